"""Settings: flat dataclasses.

In: keyword arguments, YAML or command-line flags. Out: checked settings.
"""

import warnings

from proxima.config.finetuning_config import FinetuningConfig
from proxima.config.ppo_config import PPOConfig
from proxima.config.reward_spec import RewardSpec

__all__ = ["FinetuningConfig", "PPOConfig", "RewardSpec"]


def __getattr__(name: str) -> type[FinetuningConfig]:
    if name != "StageConfig":
        raise AttributeError(f"module 'proxima.config' has no attribute {name!r}")
    warnings.warn("StageConfig is now FinetuningConfig", DeprecationWarning, stacklevel=2)
    return FinetuningConfig
