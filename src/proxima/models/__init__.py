"""The four roles (policy, frozen reference, value, reward) on as few networks as possible.

In: token ids and masks. Out: hidden states, logits, values, scores, samples; a role's weights in a folder.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.core.sampling import Sampling
    from proxima.models.backbone import Backbone, EngineSettings
    from proxima.models.base_model import BaseModel, scalar_head
    from proxima.models.policy_model import PolicyModel
    from proxima.models.response_tokens import (
        CHUNK,
        CHUNK_SHARE,
        by_chunks,
        flatten_column,
        short_chunk,
        unpack,
    )
    from proxima.models.reward_model import (
        REPORT_FILE,
        ClassifierReward,
        RewardModel,
        doubted,
        least_sure,
        pick_row,
        reward_warning,
        saved_units,
        token_head,
    )
    from proxima.models.score_unit import ScoreUnit
    from proxima.models.sft_model import SFTModel
    from proxima.models.value_model import ValueModel
    from proxima.models.weight_files import ADAPTER_FILE, HEAD_FILE, adapter_tensors, fill_adapter

__all__, __getattr__ = lazy_exports(__name__)
