"""`Evaluator`: the evaluation.

In: metrics of a step, and a validation set where one is given. Out: performance, convergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from proxima.config import PPOConfig
from proxima.core.json_record import Record
from proxima.core.tokenizer import Tokenizer
from proxima.evaluator.trend import is_rising, trend

if TYPE_CHECKING:
    from proxima.base_setup import ModelSet

PLATEAU = 10  # evaluations without improvement that count as converged where `patience` does not say
REMEMBERED = 200  # evaluations
SAMPLES = 4  # generated texts kept with an evaluation


class Evaluator:
    """Remembers the best average reward; a run that has not beaten it for a while, and does not rise, has
    converged.

    One lucky evaluation is hard to beat: the trend test sees that a run gets better slowly, under the noise.
    """

    def __init__(
        self,
        models: ModelSet | None = None,
        tokenizer: Tokenizer | None = None,
        config: PPOConfig | None = None,
        validate: Callable[[], Mapping[str, float]] | None = None,
    ):
        """
        Args:
            validate: measures the validation set: `reward` and whatever else, by name. Its reward then
                decides, not the step's. What it remembers (`state`, `restore`, where it has them) is kept
                with the evaluator's own.
        """
        self.models, self.tokenizer, self.config = models, tokenizer, config or PPOConfig()
        self.validate = validate
        self.best_reward, self.best_step = -math.inf, 0
        self.evaluations = self.evaluations_since_best = 0
        self.rewards: list[float] = []  # of the last evaluations

    def evaluate(self, metrics: Mapping[str, Any]) -> tuple[Record, Record]:
        """
        Args:
            metrics: `avg_reward` at least; losses, `step`, `generated_texts`, `rewards` and `prompts` are
                shown with the evaluation.
        Returns:
            performance: `performance_improved`, the reward judged, the best so far, the `trend` of the last
                evaluations, `validation` numbers and `samples`.
            convergence: `converged`, `should_continue` and the `reason`.
        """
        if "avg_reward" not in metrics:
            raise ValueError(f"metrics need avg_reward, got {sorted(metrics)}")
        self.evaluations += 1
        step = int(metrics.get("step", self.evaluations))
        validation = dict(self.validate()) if self.validate else {}
        reward = float(validation.get("reward", metrics["avg_reward"]))
        self.rewards = [*self.rewards, reward][-REMEMBERED:]
        improved = reward > self.best_reward + self.config.min_improvement  # anything beats -inf
        if improved:
            self.best_reward, self.best_step, self.evaluations_since_best = reward, step, 0
        else:
            self.evaluations_since_best += 1
        patience = self.config.patience or PLATEAU
        recent = self._since(2 * patience)
        performance = {
            "performance_improved": improved,
            "reward": reward,
            "best_reward": self.best_reward,
            "best_step": self.best_step,
            "trend": trend(recent),
            "policy_loss": metrics.get("policy_loss"),
            "value_loss": metrics.get("value_loss"),
            "validation": {f"validation/{name}": number for name, number in validation.items()},
            "samples": self._samples(metrics),
        }
        converged = self.evaluations_since_best >= patience and not is_rising(recent)
        stop = converged and self.config.patience > 0
        reason = (
            f"no improvement over {self.best_reward:.4g} (step {self.best_step}) in "
            f"{self.evaluations_since_best} evaluations"
        )
        return performance, {
            "converged": converged,
            "should_continue": not stop,
            "reason": reason if converged else "",
        }

    def _since(self, count: int) -> list[float]:
        """The last evaluations; the best so far has no vote in their trend unless it is the last: one lucky
        number is no fall."""
        best = len(self.rewards) - 1 - self.evaluations_since_best
        lucky = self.evaluations_since_best > 0
        return [math.nan if lucky and i == best else reward for i, reward in enumerate(self.rewards)][-count:]

    def state(self) -> Record:
        """What it remembers, as plain values."""
        best = None if self.best_reward == -math.inf else self.best_reward
        rewards = [None if math.isnan(reward) else reward for reward in self.rewards]
        counts = [self.evaluations, self.evaluations_since_best]
        held_out = getattr(self.validate, "state", lambda: None)()
        return {
            "best": [best, self.best_step],
            "evaluations": counts,
            "rewards": rewards,
            "held_out": held_out,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        best, self.best_step = state["best"]
        self.best_reward = -math.inf if best is None else best
        counts = state["evaluations"] if "evaluations" in state else state["verdicts"]  # the older name
        self.evaluations, self.evaluations_since_best = counts
        self.rewards = [math.nan if reward is None else reward for reward in state.get("rewards", [])]
        if state.get("held_out") is not None:
            getattr(self.validate, "restore", lambda kept: None)(state["held_out"])

    def _samples(self, metrics: Mapping[str, Any]) -> list[Record]:
        columns = {name: list(metrics[key]) for name, key in SAMPLE_KEYS.items() if key in metrics}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)][
            :SAMPLES
        ]


SAMPLE_KEYS = {"prompt": "prompts", "text": "generated_texts", "reward": "rewards"}
