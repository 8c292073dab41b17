"""Before PPO: loading.

In: a config. Out: the tokenizer, the LoRA settings and the four models on one device.
"""

from proxima.base_setup.base_setup import BaseSetup
from proxima.base_setup.model_setup import ModelSet

__all__ = ["BaseSetup", "ModelSet"]
