"""Runs that differ in their seed only, as one experiment: mean curve and interval over seeds. In: runs with
their settings. Out: groups that differ in their seed only, and their mean curve.

The interval is Student's t for the mean: low, high = mean -+ t(0.975, n - 1) * s / sqrt(n).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import fmean, stdev

from proxima.config import PPOConfig, declarations

# Quantiles 0.975 of Student's t by degrees of freedom from 1; beyond, the normal curve's is near enough.
T = (
    *(
        12.706205,
        4.302653,
        3.182446,
        2.776445,
        2.570582,
        2.446912,
        2.364624,
        2.306004,
        2.262157,
        2.228139,
        2.200985,
    ),
    *(
        2.178813,
        2.160369,
        2.144787,
        2.131450,
        2.119905,
        2.109816,
        2.100922,
        2.093024,
        2.085963,
        2.079614,
        2.073873,
    ),
    *(2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272),
)
NORMAL = 1.959964


def group_by_seed(configs: Mapping[str, Mapping[str, object]]) -> dict[str, list[str]]:
    """Names of the runs of each group of two seeds or more, by the group's own name.

    A run without settings is in none.
    """
    free = {name for name, each in declarations(PPOConfig).items() if not each.defines_experiment}
    alike: dict[str, list[str]] = {}
    for name, config in configs.items():
        if config:
            same = {key: value for key, value in config.items() if key not in free}
            alike.setdefault(json.dumps(same, sort_keys=True, default=str), []).append(name)
    groups: dict[str, list[str]] = {}
    for names in alike.values():
        if len({str(configs[name].get("seed", 0)) for name in names}) > 1:
            title = f"{_common(names)} ({len(names)} seeds)"
            groups[f"{names[0]} … {names[-1]} ({len(names)} seeds)" if title in groups else title] = names
    return groups


def mean_curve(
    curves: Sequence[Mapping[float, float]], most: int = 0
) -> list[tuple[float, float, float, float]]:
    """Step, mean, low and high at every step of which all curves (step -> number) have a finite number.

    Args:
        most: about how many evenly spaced steps to keep, and the last; 0 = all.
    """
    shared = sorted(set(curves[0]).intersection(*curves[1:])) if curves else []
    every = -(-len(shared) // most) if most else 1
    rows = []
    for step in dict.fromkeys([*shared[::every], *shared[-1:]]) if every else ():
        values = [curve[step] for curve in curves]
        if all(map(math.isfinite, values)):
            rows.append((step, *t_interval(values)))
    return rows


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval of it; of one number only the mean is known."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    factor = T[len(values) - 2] if len(values) - 2 < len(T) else NORMAL
    half = factor * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def _common(names: Sequence[str]) -> str:
    """What the names begin with, without a seed's number; or the first of them."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in alike).rstrip("-_. /0123456789")
    return shared.removesuffix("seed").rstrip("-_. /") or shared or names[0]
