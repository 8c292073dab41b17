"""Win rates. In: two scores a prompt, and a judge's ties as equal scores. Out: the share won, with a bootstrap interval."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

SAMPLES = 2000  # of the bootstrap
EQUAL = 1e-9


def win_rate(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Share of prompts on which ours is better, ties half, with a bootstrap 95 % interval; prompts with a nan are left out."""
    pairs = [pair for pair in zip(ours, theirs, strict=True) if not any(map(math.isnan, pair))]
    if not pairs:
        return {"rate": math.nan, "low": math.nan, "high": math.nan, "prompts": 0}
    wins = [1.0 if a > b + EQUAL else 0.5 if abs(a - b) <= EQUAL else 0.0 for a, b in pairs]
    rng = random.Random(f"bootstrap {seed}")
    rates = sorted(sum(rng.choices(wins, k=len(wins))) / len(wins) for _ in range(SAMPLES))
    low, high = rates[int(0.025 * SAMPLES)], rates[int(0.975 * SAMPLES) - 1]
    return {"rate": sum(wins) / len(wins), "low": low, "high": high, "prompts": len(pairs)}
