"""`Evaluator`: performance and convergence during training; when to stop early.

In: metrics of a step, and a validation set where one is given. Out: performance, convergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from proxima.config import PPOConfig
from proxima.core.json_record import Record, RecordView
from proxima.core.tokenizer import Tokenizer
from proxima.evaluator.trend import is_rising, trend
from proxima.runs import held_out_evidence, judges_in

if TYPE_CHECKING:
    from proxima.base_setup import ModelSet

PLATEAU = 10  # evaluations without improvement that count as converged where `patience` does not say
REMEMBERED = 200  # evaluations
JUDGES = "judges"
SAMPLES = 4  # generated texts kept with an evaluation


class Evaluator:
    """Remembers the best average reward, or win rate by judges if there are any; a run that has not beaten
    it for a while, and does not rise, has converged.

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
                decides, not the step's; and where it has win rates by judges, who are not trained on, they
                decide. What it remembers (`state`, `restore`, where it has them) is kept with the
                evaluator's own.
        """
        self.models = models
        self.tokenizer = tokenizer
        self.config = config or PPOConfig()
        self.validate = validate
        self.best_reward, self.best_step = -math.inf, 0
        self.evaluations = self.evaluations_since_best = 0
        self.rewards: list[float] = []  # what decided the last evaluations
        self.decided_by = ""  # reward or judges; a resumed run keeps who decided before

    def evaluate(self, metrics: RecordView, policy_waits: bool = False) -> tuple[Record, Record]:
        """
        Args:
            metrics: `avg_reward` at least; losses, `step`, `generated_texts`, `rewards` and `prompts` are
                shown with the evaluation.
            policy_waits: whether the step was one of critic warm-up. The policy is then what it was: after
                the first, such evaluations neither improve nor count against `patience`.
        Returns:
            performance: `performance_improved`, the reward, the `evidence` that decides and the best of it so
                far, the `trend` of the last evaluations, `validation` numbers and `samples`.
            convergence: `converged`, `should_continue` and the `reason`.
        """
        if "avg_reward" not in metrics:
            raise ValueError(f"metrics need avg_reward, got {sorted(metrics)}")
        self.evaluations += 1
        step = int(metrics.get("step", self.evaluations))
        validation = dict(self.validate()) if self.validate else {}
        reward = float(validation["reward"] if "reward" in validation else metrics["avg_reward"])
        evidence = self._evidence(validation, reward)
        counts = not (policy_waits and self.rewards)
        improved = counts and evidence > self.best_reward + self.config.min_improvement  # anything beats -inf
        if counts:
            self.rewards = [*self.rewards, evidence][-REMEMBERED:]
            self.evaluations_since_best += 1
        if improved:
            self.best_reward, self.best_step, self.evaluations_since_best = evidence, step, 0
        patience = self.config.patience or PLATEAU
        recent = self._since(2 * patience)
        performance = {
            "performance_improved": improved,
            "reward": reward,
            "evidence": evidence,
            "decided_by": self.decided_by,
            "best_reward": self.best_reward,
            "best_step": self.best_step,
            "trend": trend(recent),
            "policy_loss": metrics.get("policy_loss"),
            "value_loss": metrics.get("value_loss"),
            "validation": {f"validation/{name}": number for name, number in validation.items()},
            "samples": self._samples(metrics),
        }
        return performance, self._convergence(patience, is_rising(recent))

    def _convergence(self, patience: int, rising: bool) -> Record:
        converged = self.evaluations_since_best >= patience and not rising
        stop = converged and self.config.patience > 0
        by = " by judges" if self.decided_by == JUDGES else ""
        reason = (
            f"no improvement over {self.best_reward:.4g}{by} (step {self.best_step}) in "
            f"{self.evaluations_since_best} evaluations"
        )
        return {
            "converged": converged,
            "should_continue": not stop,
            "reason": reason if converged else "",
        }

    def _evidence(self, validation: Mapping[str, float], reward: float) -> float:
        judged = bool(judges_in(validation))
        judges_left = self.decided_by == JUDGES and not judged
        if not self.decided_by or judges_left:
            self.decided_by = JUDGES if judged else "reward"
            self.best_reward, self.rewards = -math.inf, []
        return held_out_evidence(validation) if self.decided_by == JUDGES else reward

    def _since(self, count: int) -> list[float]:
        """The last evaluations; the best so far has no vote in their trend unless it is the last: one lucky
        number is not a fall."""
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
            "decided_by": self.decided_by,
            "held_out": held_out,
        }

    def restore(self, state: RecordView) -> None:
        best, self.best_step = state["best"]
        self.best_reward = -math.inf if best is None else best
        counts = state["evaluations"] if "evaluations" in state else state["verdicts"]  # the older name
        self.evaluations, self.evaluations_since_best = counts
        self.rewards = [math.nan if reward is None else reward for reward in state.get("rewards", [])]
        self.decided_by = state.get("decided_by", "reward" if self.evaluations else "")
        if state.get("held_out") is not None:
            getattr(self.validate, "restore", lambda kept: None)(state["held_out"])

    def _samples(self, metrics: RecordView) -> list[Record]:
        columns = {name: list(metrics[key]) for name, key in SAMPLE_KEYS.items() if key in metrics}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)][
            :SAMPLES
        ]


SAMPLE_KEYS = {"prompt": "prompts", "text": "generated_texts", "reward": "rewards"}
