"""Runs over each other. In: metrics and configs of several runs. Out: curves; runs that differ in the seed alone are one.

Such a series is the mean over its seeds, at the steps that all of them have, with a band from the lowest to the highest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxima.report.curves import frontier
from proxima.runs import thin
from proxima.studio.curves import POINTS, Metrics, curve, short

NOT_SETTINGS = ("seed", "run_name", "run_dir")
FRONTIER = ("avg_reward", "kl_exact", "validation/reward", "validation/kl")


@dataclass(frozen=True)
class Member:
    """One run of a comparison."""

    name: str
    config: Mapping[str, Any]
    metrics: Metrics


def group(members: Sequence[Member]) -> list[tuple[str, list[Member]]]:
    """Series in the order given: runs of one config but for the seed belong together. A run without a config stays alone."""
    series: dict[str, list[Member]] = {}
    for member in members:
        settings = {name: value for name, value in member.config.items() if name not in NOT_SETTINGS}
        key = json.dumps(settings, sort_keys=True, default=str) if settings else f"alone {member.name}"
        series.setdefault(key, []).append(member)
    return [(_title(each), each) for each in series.values()]


def _title(members: Sequence[Member]) -> str:
    return (
        members[0].name
        if len(members) == 1
        else f"{members[0].name} and {len(members) - 1} more seeds".replace("1 more seeds", "1 more seed")
    )


def compare(members: Sequence[Member], names: Sequence[str]) -> dict[str, Any]:
    """For each metric one curve a series, and each series' path of reward against KL."""
    series = group(members)
    return {
        "series": [{"name": title, "runs": [member.name for member in each]} for title, each in series],
        "charts": [{"title": name, "series": [_series(title, each, name) for title, each in series]} for name in names],
        "frontier": [{"name": title, "points": _frontier(each)} for title, each in series],
        "names": sorted({name for member in members for name in member.metrics} - {"step", "epoch"}),
    }


def _series(title: str, members: Sequence[Member], name: str) -> dict[str, Any]:
    if len(members) == 1:
        metrics = members[0].metrics
        return {"name": title, "points": curve(metrics.get("step", ()), metrics.get(name, ()))}
    steps, means, lows, highs = spread([(member.metrics.get("step", ()), member.metrics.get(name, ())) for member in members])
    points = [[step, short(mean)] for step, mean in thin(steps, means, POINTS) if step is not None and mean is not None]
    low, high = dict(zip(steps, lows, strict=True)), dict(zip(steps, highs, strict=True))
    return {"name": title, "points": points, "band": [[step, short(low[step]), short(high[step])] for step, _ in points]}


def spread(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Steps that all curves have, and the mean, the lowest and the highest there."""
    columns = [{step: value for step, value in zip(*pair, strict=False) if math.isfinite(value)} for pair in curves]
    steps = sorted(set.intersection(*(set(column) for column in columns))) if columns else []
    rows = [[column[step] for column in columns] for step in steps]
    return steps, [math.fsum(row) / len(row) for row in rows], [min(row) for row in rows], [max(row) for row in rows]


def _frontier(members: Sequence[Member]) -> list[list[Any]]:
    """[KL, reward, steps] along the run; of several seeds along their mean."""
    metrics = members[0].metrics if len(members) == 1 else _mean(members)
    drawn = frontier(metrics)
    points = [] if drawn is None else drawn["series"][0]["points"]
    return [[short(kl), short(reward), steps] for kl, reward, steps in points]


def _mean(members: Sequence[Member]) -> dict[str, list[float]]:
    columns = {}
    for name in set.intersection(*(set(member.metrics) for member in members)) & {*FRONTIER}:
        steps, means, _, _ = spread([(member.metrics["step"], member.metrics[name]) for member in members])
        columns[name] = dict(zip(steps, means, strict=True))
    steps = sorted(set().union(*columns.values()))
    return {"step": steps} | {name: [column.get(step, math.nan) for step in steps] for name, column in columns.items()}
