"""`proxima train`: PPO on a file of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proxima.config import PPOConfig


@dataclass
class Train:
    """Train a policy with PPO on a file of prompts."""

    ppo: PPOConfig
    data: Path
    """Prompts: .txt, one a line, or .jsonl with a `prompt` field."""
    validation: Path | None = None
    """Held-out prompts that decide what is best and when to stop; the same forms."""
    epochs: int = 1
    """Passes over the prompts."""

    def run(self) -> None:
        from proxima.ppo_trainer import PPOTrainer
        from proxima.prompts import read_prompts

        if not self.ppo.rewards:
            raise ValueError(
                "no reward is configured; give --rewards module:function, a reward model's folder or a Hub id "
                "(several may follow each other, WEIGHT*SOURCE weighs one)"
            )
        prompts = read_prompts(self.data)
        held_out = read_prompts(self.validation) if self.validation else None
        results = PPOTrainer(self.ppo).train(prompts, self.epochs, held_out)
        print(f"stopped: {results.stop_reason}; best step {results.best_step}; results in {results.run_folder}")
