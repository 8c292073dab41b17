"""Win rates and their bootstrap intervals. In: two scores per prompt, or one preference per prompt. Out: the
fraction won, with a bootstrap interval.

A preference is the probability that ours is better: 1 won, 0.5 a tie, 0 lost, nan where it is unknown.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

SAMPLES = 2000  # of the bootstrap
EQUAL = 1e-9


def win_rate(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Fraction of prompts on which ours is better, ties counted half, with a 95 % bootstrap interval; prompts
    with a nan are left out."""
    return share_won(preferences(ours, theirs), seed)


def preferences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The higher score is better."""
    return [_preference(a, b) for a, b in zip(ours, theirs, strict=True)]


def _preference(ours: float, theirs: float) -> float:
    if math.isnan(ours) or math.isnan(theirs):
        return math.nan
    return 1.0 if ours > theirs + EQUAL else 0.5 if abs(ours - theirs) <= EQUAL else 0.0


def share_won(preferences: Sequence[float], seed: int = 0) -> dict[str, float]:
    """`rate`, its 95 % interval `low` to `high`, and `prompts`: the number of prompts it is based on."""
    rate, low, high = mean_interval(preferences, seed)
    return {
        "rate": rate,
        "low": low,
        "high": high,
        "prompts": sum(not math.isnan(each) for each in preferences),
    }


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """The mean and its 95 % interval by the percentile bootstrap; nan are left out, and all three are nan
    where nothing is left."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan, math.nan, math.nan
    rng = random.Random(f"bootstrap {seed}")
    means = sorted(sum(rng.choices(known, k=len(known))) / len(known) for _ in range(SAMPLES))
    return sum(known) / len(known), means[int(0.025 * SAMPLES)], means[int(0.975 * SAMPLES) - 1]
