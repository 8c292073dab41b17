"""`BaseSetup`: loads everything that a trainer needs, from the config alone."""

from __future__ import annotations

from proxima.base_setup.learning_rates import fill_learning_rates
from proxima.base_setup.model_setup import build_models
from proxima.base_setup.tokenizer_setup import load_tokenizer
from proxima.config import PPOConfig


class BaseSetup:
    """The tokenizer and the four models, all on one device."""

    def __init__(self, config: PPOConfig):
        self.config = config
        self.tokenizer = load_tokenizer(config.model_name, config.trust_remote_code)
        self.models = build_models(config, self.tokenizer)
        network = self.models.sft.backbone.network
        fill_learning_rates(
            config, sum(p.numel() for name, p in network.named_parameters() if "lora_" not in name)
        )
        self.device = self.models.device
