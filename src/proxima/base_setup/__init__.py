"""Loading, before PPO starts: from a config to the tokenizer, the LoRA adapters and the four models."""

from proxima.base_setup.base_setup import BaseSetup
from proxima.base_setup.model_setup import ModelSet

__all__ = ["BaseSetup", "ModelSet"]
