"""Early stopping's question: is a noisy curve still rising? In: numbers in order. Out: the Theil-Sen slope,
and how likely so clear a rise is by chance.

Mann-Kendall: S = sum over i < j of sign(x_j - x_i), of variance (n (n - 1) (2n + 5) - sum t (t - 1) (2t + 5))
/ 18 where there is no trend (t = sizes of groups of equal numbers); z = (S - 1) / sqrt(variance). Slope: the
median of (x_j - x_i) / (j - i).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist, median

CLEAR = 0.05  # a rise less likely than this by chance is one


def trend(values: Sequence[float]) -> dict[str, float]:
    """`slope` per place, and `chance` of a score as high where there is no trend: small = it rises, near 1 =
    it falls.

    nan for fewer than two numbers. A nan among them keeps its place and is left out.
    """
    known = [(place, value) for place, value in enumerate(values) if not math.isnan(value)]
    if len(known) < 2:
        return {"slope": math.nan, "chance": math.nan}
    steps = [(later[1] - earlier[1], later[0] - earlier[0]) for earlier, later in combinations(known, 2)]
    score = sum((change > 0) - (change < 0) for change, _ in steps)
    count = len(known)
    ties = sum(t * (t - 1) * (2 * t + 5) for t in Counter(value for _, value in known).values())
    variance = (count * (count - 1) * (2 * count + 5) - ties) / 18
    chance = 1 - NormalDist().cdf((score - 1) / math.sqrt(variance)) if variance else 1.0
    return {"slope": median(change / places for change, places in steps), "chance": chance}


def is_rising(values: Sequence[float]) -> bool:
    return trend(values)["chance"] < CLEAR
