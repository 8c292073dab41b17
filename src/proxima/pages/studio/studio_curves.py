"""Curves for the page. In: columns of a run by name. Out: charts to draw, in the report's groups; points few
enough to draw.

Absent numbers are left out, so that a metric of every tenth step is a line too.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from proxima.core.json_record import Record
from proxima.pages.report import MARKED, NOT_DRAWN, bounds, interval_names, meanings
from proxima.runs import charts_in_groups, thin

POINTS = 600
"""Points per curve; a screen shows no more."""
OPEN = 3
"""Groups drawn at once; the others when they are opened."""

Metrics = Mapping[str, Sequence[float]]


def groups(metrics: Metrics) -> list[Record]:
    """What to draw: every metric in one chart, in the groups of its declaration."""
    ends = bounds(metrics)
    wanted = [name for name in metrics if name not in NOT_DRAWN and name not in ends]
    return [
        {
            "title": group.title,
            "text": group.text,
            "open": place < OPEN,
            "charts": [
                {
                    "title": chart.title,
                    "unit": chart.unit,
                    "names": chart.names,
                    "marked": chart.names[0] in MARKED,
                    "about": meanings(chart.names),
                }
                for chart in charts
            ],
        }
        for place, (group, charts) in enumerate(charts_in_groups(wanted))
    ]


def curve(
    steps: Sequence[float], values: Sequence[float], after: float = -1, points: int = POINTS
) -> list[list[float]]:
    """[step, value] of the steps after one, thinned; every number in six digits."""
    start = bisect_right(steps, after)
    there = [
        (step, value)
        for step, value in zip(steps[start:], values[start:], strict=True)
        if math.isfinite(value)
    ]
    thinned = thin([step for step, _ in there], [value for _, value in there], points)
    return [[step, short(value)] for step, value in thinned if step is not None and value is not None]


def band(metrics: Metrics, name: str, after: float = -1) -> list[list[float]]:
    """[step, low, high] of a metric that was logged with its interval."""
    ends = interval_names(metrics, name)
    if ends is None:
        return []
    rows = zip(metrics["step"], metrics[ends[0]], metrics[ends[1]], strict=True)
    known = [[step, short(low), short(high)] for step, low, high in rows if step > after and low <= high]
    return known[:: math.ceil(len(known) / POINTS) or 1]


def short(value: float) -> float:
    return float(f"{value:.6g}")
