"""`proxima sft` and `proxima reward`: the stages before PPO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proxima.config import StageConfig


@dataclass
class Sft:
    """Fine-tune a model on demonstrations (supervised): the stage that gives PPO its reference."""

    stage: StageConfig
    data: Path
    """Demonstrations: .jsonl or .jsonl.gz with `prompt` and `completion`."""
    validation: Path | None = None
    """Held-out demonstrations; by default a share of the data."""

    def run(self) -> None:
        from proxima.stages import SFTTrainer, read_demonstrations

        held_out = read_demonstrations(self.validation) if self.validation else None
        results = SFTTrainer(self.stage).train(read_demonstrations(self.data), held_out)
        best = results.best
        print(f"stopped: {results.stop_reason}; validation loss {best['validation_loss']:.4f} at step {best['step']:.0f}")
        print(f"left out as too long: {results.left_out}; saved to {results.folder}")


@dataclass
class Reward:
    """Train a reward model on preferences: which of two answers is better."""

    stage: StageConfig
    data: Path
    """Preferences: .jsonl or .jsonl.gz with `prompt`, `chosen` and `rejected`."""
    validation: Path | None = None
    """Held-out preferences; by default a share of the data."""
    demonstrations: Path | None = None
    """Demonstrations that shall score 0 on average; by default the training answers do."""

    def run(self) -> None:
        from proxima.stages import RewardTrainer, read_demonstrations, read_preferences

        held_out = read_preferences(self.validation) if self.validation else None
        centre = read_demonstrations(self.demonstrations) if self.demonstrations else None
        results = RewardTrainer(self.stage, centre_on=centre).train(read_preferences(self.data), held_out)
        best = results.best
        print(
            f"stopped: {results.stop_reason}; held-out accuracy {best['accuracy']:.3f}, loss {best['validation_loss']:.4f}, "
            f"calibration error {best['calibration_error']:.3f}"
        )
        print(f"left out as too long: {results.left_out}; use it with --rewards {results.folder}")
