"""Before the road: flat dataclasses. In: keyword arguments, YAML or command-line flags. Out: checked settings."""

from proxima.config.ppo_config import PPOConfig
from proxima.config.reward_spec import RewardSpec
from proxima.config.stage_config import StageConfig

__all__ = ["PPOConfig", "RewardSpec", "StageConfig"]
