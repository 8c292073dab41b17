"""What a training run gives back. In: metrics and evaluations. Out: `TrainingResults`, one line per step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from proxima.core.json_record import Record

DONE = "all epochs done"


@dataclass(repr=False)
class TrainingResults:
    """What `PPOTrainer.train` did."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    """One dict per step, by the names of `proxima.runs.glossary.GLOSSARY`; those of a resumed run from its
    first step on."""
    start: dict[str, float] = field(default_factory=dict)
    """The evaluation before the first step, by the same names; empty without validation prompts."""
    best_step: int = 0
    """The step with the best evaluation, counted from 1; 0 = the model that the run began with."""
    stop_reason: str = ""
    """Why it ended: `all epochs done`, the evaluator's reason or a guard's."""
    evaluation: Record = field(default_factory=dict)
    """The last evaluation: performance and convergence."""
    run_folder: Path = Path()
    """Config, metrics, samples, checkpoints and the trained adapters."""

    def __repr__(self) -> str:
        rewards = [step["avg_reward"] for step in self.metrics]
        moved = f", reward {rewards[0]:.4g} to {rewards[-1]:.4g}" if rewards else ""
        return (
            f"TrainingResults: {len(rewards)} step{'s' * (len(rewards) != 1)}{moved}, best step "
            f"{self.best_step}; {self.stop_reason}; in {self.run_folder}"
        )


def start_line(start: dict[str, float]) -> str:
    """The evaluation before the first step, in one line."""
    return f"step {start['step']:>4.0f}  validation reward {start['validation/reward']:.4g} before training"


def step_line(metrics: dict[str, float]) -> str:
    """One line for each step."""
    shown = {
        "reward": "avg_reward",
        "kl": "kl",
        "policy": "policy_loss",
        "value": "value_loss",
        "length": "response_length",
    }
    numbers = "  ".join(
        f"{label} {metrics[name]:.4g}" for label, name in shown.items() if not math.isnan(metrics[name])
    )
    return f"step {metrics['step']:>4.0f}  {numbers}  {metrics['seconds']:.1f} s"
