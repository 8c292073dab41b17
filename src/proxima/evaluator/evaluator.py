"""`Evaluator`: the verdict. In: metrics of a step, and a validation set where one is given. Out: performance, convergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from proxima.config import PPOConfig

PLATEAU = 10  # verdicts without improvement that count as converged where `patience` does not say
SAMPLES = 4  # generated texts kept with a verdict


class Evaluator:
    """Remembers the best average reward; a run that has not beaten it for a while has converged."""

    def __init__(
        self,
        models: Any = None,
        tokenizer: Any = None,
        config: PPOConfig | None = None,
        validate: Callable[[], Mapping[str, float]] | None = None,
    ):
        """
        Args:
            validate: measures the validation set: `reward` and whatever else, by name. Its reward then decides, not the step's.
        """
        self.models, self.tokenizer, self.config = models, tokenizer, config or PPOConfig()
        self.validate = validate
        self.best_reward, self.best_step = -math.inf, 0
        self.verdicts = self.verdicts_since_best = 0

    def evaluate(self, metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        Args:
            metrics: `avg_reward` at least; losses, `step`, `generated_texts`, `rewards` and `prompts` are kept.
        Returns:
            performance: `performance_improved`, the reward judged, the best so far, `validation` numbers and `samples`.
            convergence: `converged`, `should_continue` and the `reason`.
        """
        if "avg_reward" not in metrics:
            raise ValueError(f"metrics need avg_reward, got {sorted(metrics)}")
        self.verdicts += 1
        step = int(metrics.get("step", self.verdicts))
        validation = dict(self.validate()) if self.validate else {}
        reward = float(validation.get("reward", metrics["avg_reward"]))
        improved = reward > self.best_reward + (self.config.min_improvement if self.best_step else 0.0)
        if improved:
            self.best_reward, self.best_step, self.verdicts_since_best = reward, step, 0
        else:
            self.verdicts_since_best += 1
        performance = {
            "performance_improved": improved,
            "reward": reward,
            "best_reward": self.best_reward,
            "best_step": self.best_step,
            "policy_loss": metrics.get("policy_loss"),
            "value_loss": metrics.get("value_loss"),
            "validation": {f"validation/{name}": number for name, number in validation.items()},
            "samples": self._samples(metrics),
        }
        converged = self.verdicts_since_best >= (self.config.patience or PLATEAU)
        stop = converged and self.config.patience > 0
        reason = f"no improvement over {self.best_reward:.4g} (step {self.best_step}) in {self.verdicts_since_best} verdicts"
        return performance, {"converged": converged, "should_continue": not stop, "reason": reason if converged else ""}

    def state(self) -> dict[str, Any]:
        """What it remembers, as plain values."""
        best = None if self.best_reward == -math.inf else self.best_reward
        return {"best": [best, self.best_step], "verdicts": [self.verdicts, self.verdicts_since_best]}

    def restore(self, state: Mapping[str, Any]) -> None:
        best, self.best_step = state["best"]
        self.best_reward = -math.inf if best is None else best
        self.verdicts, self.verdicts_since_best = state["verdicts"]

    def _samples(self, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
        columns = {name: list(metrics[key]) for name, key in SAMPLE_KEYS.items() if key in metrics}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)][:SAMPLES]


SAMPLE_KEYS = {"prompt": "prompts", "text": "generated_texts", "reward": "rewards"}
