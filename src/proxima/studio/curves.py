"""Curves for the page. In: columns of a run by name. Out: charts to draw, and points few enough to draw them.

Absent numbers are left out, so that a metric of every tenth step is a line too.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from proxima.runs import thin

POINTS = 600
"""Points a curve; a screen shows no more."""
ASIDE = {"step", "epoch"}

CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "Mean score of a step's answers. Should rise.", ("avg_reward", "validation/reward")),
    ("KL from the reference", "How far the policy has gone, in nats a sequence.", ("kl", "kl_exact", "validation/kl")),
    ("Rewards by name", "Each reward before its weight.", ("reward/*",)),
    ("Entropy", "Spread of the next token, in nats. A fall to zero is a collapse.", ("entropy",)),
    ("Length", "Tokens an answer.", ("response_length", "validation/response_length")),
    ("Ended by themselves", "Share of answers with an end of their own.", ("eos_rate", "validation/eos_rate")),
    ("Policy loss", "PPO-clip loss; its sign says little.", ("policy_loss",)),
    ("Value loss", "Squared error of the value model. Should fall.", ("value_loss",)),
    ("Explained variance", "1 = values foresee the returns, 0 = no better than a constant.", ("explained_variance",)),
    ("Clipped tokens", "Share of tokens whose update clipping stopped.", ("clip_fraction",)),
    ("KL inside the update", "How far one update moves the policy, in nats a token.", ("approx_kl",)),
    ("Largest ratio", "New over old probability, the largest token of the update.", ("ratio_max",)),
    ("Gradient norms", "Before clipping.", ("grad_norm_policy", "grad_norm_value")),
    ("KL coefficient", "Weight of the KL penalty.", ("kl_coef",)),
    ("Seconds a step", "By stage.", ("seconds", "seconds/*")),
)
OPEN = 9
"""Charts drawn at once; the others when they are asked for."""


def charts(names: Sequence[str]) -> list[dict[str, Any]]:
    """What to draw of these metrics: the charts above, then one for each metric that is in none of them."""
    left = [name for name in names if name not in ASIDE]
    found = []
    for title, about, wanted in CHARTS:
        mine = [name for pattern in wanted for name in left if name == pattern or _fits(name, pattern)]
        if mine:
            found.append({"title": title, "about": about, "names": list(dict.fromkeys(mine))})
            left = [name for name in left if name not in mine]
    rest = [{"title": name, "about": "", "names": [name]} for name in left]
    return [{**chart, "open": place < OPEN} for place, chart in enumerate(found + rest)]


def _fits(name: str, pattern: str) -> bool:
    return pattern.endswith("/*") and name.startswith(pattern[:-1])


def curve(steps: Sequence[float], values: Sequence[float], after: float = -1, points: int = POINTS) -> list[list[float]]:
    """[step, value] of the steps after one, thinned; every number in six digits."""
    start = bisect_right(steps, after)
    there = [(step, value) for step, value in zip(steps[start:], values[start:], strict=True) if math.isfinite(value)]
    thinned = thin([step for step, _ in there], [value for _, value in there], points)
    return [[step, short(value)] for step, value in thinned if step is not None and value is not None]


def short(value: float) -> float:
    return float(f"{value:.6g}")


def frontier(metrics: Mapping[str, Sequence[float]], points: int = 40) -> list[list[float]]:
    """[KL, reward], the means over stretches of steps, in the order of their KL. Held-out numbers where there are some."""
    held_out = any(map(math.isfinite, metrics.get("validation/kl", ())))
    x, y = ("validation/kl", "validation/reward") if held_out else ("kl", "avg_reward")
    there = [
        pair
        for pair in zip(metrics.get(x, ()), metrics.get(y, ()), strict=False)
        if all(math.isfinite(value) for value in pair)
    ]
    count = min(points, len(there))
    stretches = [there[i * len(there) // count : (i + 1) * len(there) // count] for i in range(count)]
    return sorted([short(math.fsum(column) / len(stretch)) for column in zip(*stretch, strict=True)] for stretch in stretches)
