"""How the time of a step grows with its size.

In: a case. Out: seconds at half, once and twice its batch, prompt and response.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from proxima.core.json_record import Record
from proxima.runs import Plot
from proxima.tools.bench.bench_case import Case, run_case
from proxima.tools.bench.hardware_floor import Machine

FACTORS = (0.5, 1.0, 2.0)
DIMENSIONS = ("batch", "prompt", "response")


def sized(case: Case, dimension: str, factor: float) -> tuple[int, Case]:
    """The case with one of its sizes changed, and that size."""
    if dimension == "batch":
        size = round(case.batch * factor)
        return size, replace(case, batch=size)
    size = round(getattr(case, dimension)[1] * factor)
    changed: Record = {dimension: (size, size)}
    return size, replace(case, **changed)


def growth(points: list[tuple[int, float]]) -> float:
    """The largest growth between neighbouring sizes, relative to linear: 1 = linear, below 1 = better."""
    return max((after[1] / before[1]) / (after[0] / before[0]) for before, after in pairwise(points))


def run_scaling(
    case: Case, seconds: float, machine: Machine, steps: int, folder: str, **settings: object
) -> Record:
    """Seconds per step by size, and the growth, for each dimension.

    Args:
        seconds: of the case itself, which has been timed already.
    """
    done = {case: seconds}
    found = {}
    for dimension in DIMENSIONS:
        points = []
        for factor in FACTORS:
            size, changed = sized(case, dimension, factor)
            if changed not in done:
                done[changed] = run_case(changed, machine, steps, folder, **settings)["seconds"]
            points.append((size, done[changed]))
        found[dimension] = {"points": points, "growth": growth(points)}
    return found


def growth_plot(found: Record) -> Plot:
    """The measured times, and linear growth from the smallest size."""
    charts = []
    for dimension, result in found.items():
        first, seconds = result["points"][0]
        line = [[size, seconds * size / first] for size, _ in result["points"]]
        series = [{"name": "measured", "points": result["points"]}, {"name": "linear", "points": line}]
        charts.append({"title": f"seconds per step by {dimension}", "x": dimension, "series": series})
    return Plot(charts)


def scaling_table(found: Record) -> str:
    lines = [f"  {'':10}{'size: seconds per step':42}growth (1 = linear)"]
    for dimension, result in found.items():
        shown = "   ".join(f"{size}: {seconds:.3f}" for size, seconds in result["points"])
        lines.append(f"  {dimension:10}{shown:42}{result['growth']:.2f}")
    return "\n".join(lines)
