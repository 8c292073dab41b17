"""What lets a run continue after a kill.

In: a step's state. Out: folders on disk that are whole, checked, or passed over.
"""

from proxima.runs.checkpoint.atomic_folders import write_folder
from proxima.runs.checkpoint.checkpoints import Checkpoint, Checkpoints, eval_reward

__all__ = ["Checkpoint", "Checkpoints", "eval_reward", "write_folder"]
