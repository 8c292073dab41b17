"""`proxima generate`: sample responses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from proxima.config import PPOConfig


@dataclass
class Generate:
    """Sample responses from a model, with or without a trained adapter."""

    ppo: PPOConfig
    prompt: tuple[str, ...] = ()
    """Prompts to answer."""
    data: Path | None = None
    """File with more prompts, as for `train`."""
    adapter: str = ""
    """Folder of a trained policy adapter, for example runs/NAME/policy."""

    def run(self) -> None:
        from proxima.base_setup import BaseSetup
        from proxima.ppo_trainer import SequenceGenerator
        from proxima.prompts import read_prompts

        prompts = [*self.prompt, *(read_prompts(self.data) if self.data else [])]
        config = dataclasses.replace(self.ppo, sft_adapter=self.adapter) if self.adapter else self.ppo
        setup = BaseSetup(config)
        texts = SequenceGenerator(setup.models, setup.tokenizer, config).sample(prompts).texts()
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt}\n  -> {text}\n")
