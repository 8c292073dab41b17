"""What answers became as the policy left the reference: length, openings and variety against KL. In: the
metrics of a run. Out: charts as `chart.js` draws them.
"""

from __future__ import annotations

import math

from proxima.core.json_record import Record
from proxima.pages.report.over_optimisation import WATCHED, Metrics, points_of
from proxima.runs import explain, title_of, unit_of, with_unit, without_backticks

DRAWN = ("length", "opening", "variety", "spread")  # of what over-optimisation is judged by
NOTE = "Each point is one part of the run; a bend where the reward still rises is where gaming may begin."


def signs_against_kl(metrics: Metrics) -> list[Record]:
    """One chart for each that the run measured and that changed."""
    points = points_of(metrics)
    charts = []
    for name in DRAWN:
        drawn = [
            [point["kl"], point[name], f"step {point['step']:g}"]
            for point in points
            if math.isfinite(point["kl"] + point[name])
        ]
        if len({row[1] for row in drawn}) > 1:
            charts.append(_chart(_measured(name, metrics), _measured("kl", metrics), drawn))
    return charts


def _measured(name: str, metrics: Metrics) -> str:
    """The held-out metric if there is one, else that of training."""
    return next(each for each in WATCHED[name] if each in metrics)


def _chart(metric: str, kl: str, drawn: list[list[object]]) -> Record:
    declared = explain(metric)
    meaning = without_backticks(declared.meaning) if declared else ""
    return {
        "title": f"{title_of(metric)} against KL",
        "note": f"{meaning} {NOTE}".strip(),
        "x": with_unit(kl),
        "y": unit_of(metric),
        "free": True,
        "series": [{"name": metric, "points": drawn}],
    }
