"""Before the road: flat dataclasses.

In: keyword arguments, YAML or command-line flags. Out: checked settings.
"""

from proxima.config.finetuning_config import StageConfig
from proxima.config.ppo_config import PPOConfig
from proxima.config.reward_spec import RewardSpec

__all__ = ["PPOConfig", "RewardSpec", "StageConfig"]
