"""A run's verifiable rewards beside their best constant answers. In: metrics, what the run kept. Out:
sentences, and whether the policy earns more than one answer given to every prompt would."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxima.pages.report.report_curves import SHOWN, Constants
from proxima.pages.report.run_outcome import StepMean, ends
from proxima.pages.report.short_numbers import short


@dataclass(frozen=True)
class AgainstConstant:
    """The training score of one verifiable reward at both ends of a run, and its best constant answer's."""

    reward: str
    answer: str
    constant: float
    first: StepMean
    last: StepMean

    @property
    def noise(self) -> float:
        """Of the last mean; 0 where the steps are too few to tell."""
        return self.last.error if math.isfinite(self.last.error) else 0.0

    @property
    def is_above(self) -> bool:
        return self.last.mean - self.constant > self.noise

    @property
    def rise(self) -> int:
        """1 if the score rose beyond its noise, -1 if it fell, else 0."""
        change = self.last.mean - self.first.mean
        return int(math.copysign(abs(change) > math.hypot(self.first.error, self.last.error), change))

    @property
    def has_reached(self) -> bool:
        """Whether the score rose to that of the constant answer, and stayed there."""
        return self.rise > 0 and not self.is_above and self.constant - self.last.mean <= self.noise

    @property
    def sentence(self) -> str:
        scored = f"The best constant answer, {self.answer[:SHOWN]!r}, scores {short(self.constant)}"
        if self.is_above:
            return f"{scored} by {self.reward}, the policy {short(self.last.mean)}."
        return f"{scored} by {self.reward}, and the policy no more: {short(self.last.mean)}."


def against_constants(
    metrics: Mapping[str, Sequence[float]], constants: Constants
) -> Iterator[AgainstConstant]:
    for reward, (answer, constant) in constants.items():
        first, last = ends(metrics.get(f"reward/{reward}", ()))
        if last.steps:
            yield AgainstConstant(reward, answer, constant, first, last)


def vouch_for_gain(against: Sequence[AgainstConstant]) -> bool:
    """Whether all verifiable rewards stand above their best constant answers, one rose and none fell."""
    rises = {each.rise for each in against}
    return all(each.is_above for each in against) and 1 in rises and -1 not in rises
