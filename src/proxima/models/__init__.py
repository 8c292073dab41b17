"""The four roles (policy, frozen reference, value, reward) on as few networks as possible.

In: token ids and masks. Out: hidden states, logits, values, scores, samples; a role's weights in a folder.
"""

from proxima.core.sampling import Sampling
from proxima.models.backbone import Backbone
from proxima.models.base_model import BaseModel
from proxima.models.policy_model import PolicyModel
from proxima.models.reward_model import ClassifierReward, RewardModel
from proxima.models.sft_model import SFTModel
from proxima.models.value_model import ValueModel

__all__ = [
    "Backbone",
    "BaseModel",
    "ClassifierReward",
    "PolicyModel",
    "RewardModel",
    "SFTModel",
    "Sampling",
    "ValueModel",
]
