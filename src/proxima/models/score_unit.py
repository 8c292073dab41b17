"""`ScoreUnit`: what a reward model's scores are measured in: mean 0 and unit variance over sampled answers.

A reward model's own scale is arbitrary. In this unit `kl_coef` means the same for every model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SMALLEST = 1e-5  # deviation relative to the scores' size, below which they count as constant


@dataclass(frozen=True)
class ScoreUnit:
    """A score becomes (score - mean) / deviation."""

    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, scores: Tensor, name: str) -> ScoreUnit:
        """The unit in which these scores have mean 0 and unit variance; failed ones (nan) are left out.

        Args:
            name: of the reward model, for the error where all scores are the same.
        """
        known = scores[~scores.isnan()].cpu().double()  # MPS has no float64
        if len(known) < 2:
            raise ValueError(f"{name} gave {len(known)} scores; its mean and deviation need at least 2")
        mean, deviation = float(known.mean()), float(known.std(unbiased=False))
        if deviation <= SMALLEST * max(1.0, abs(mean)):
            raise ValueError(
                f"{name} scores all {len(known)} sampled answers {mean:.4g}: there is nothing to learn from "
                "it; check its data, learning rate and label"
            )
        return cls(mean, deviation)

    def __call__(self, scores: Tensor) -> Tensor:
        return (scores - self.mean) / self.deviation

    def then(self, other: ScoreUnit) -> ScoreUnit:
        """The unit that is this one and after it another."""
        return ScoreUnit(self.mean + self.deviation * other.mean, self.deviation * other.deviation)

    @property
    def inverse(self) -> ScoreUnit:
        """What takes scores out of this unit again."""
        return ScoreUnit(-self.mean / self.deviation, 1 / self.deviation)
