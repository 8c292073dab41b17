"""Before the road: one flat dataclass. In: keyword arguments, YAML or command-line flags. Out: checked settings."""

from proxima.config.ppo_config import PPOConfig, RewardSpec

__all__ = ["PPOConfig", "RewardSpec"]
