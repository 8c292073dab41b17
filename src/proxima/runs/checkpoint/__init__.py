"""Checkpoints: what lets a run continue after a kill.

In: a step's state. Out: folders on disk that are whole, checked, or skipped.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.runs.checkpoint.atomic_folders import Damaged, replace_text, sync, write_folder
    from proxima.runs.checkpoint.checkpoint_tensors import (
        fill_optimizer,
        load_optimizer,
        load_random_state,
        optimizer_tensors,
        random_numbers,
        same_random_state,
        save_optimizer,
        save_random_tensors,
        set_random_state,
    )
    from proxima.runs.checkpoint.checkpoints import Checkpoint, Checkpoints, eval_reward

__all__, __getattr__ = lazy_exports(__name__)
