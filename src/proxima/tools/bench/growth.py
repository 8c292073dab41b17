"""`proxima bench --scaling` and `--lengths`: how the time of a step grows with its size.

In: a case. Out: seconds at half, once and twice its batch, prompt and response, or by response length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise

from proxima.core.json_record import Record
from proxima.runs import Plot
from proxima.runtime import is_out_of_memory
from proxima.tools.bench.bench_case import Case, run_case
from proxima.tools.bench.hardware_floor import Machine
from proxima.tools.bench.random_model import SHAPES, free_memory

FACTORS = (0.5, 1.0, 2.0)
LENGTHS = (256, 1024, 4096, 16_384)
"""Response tokens."""
STEP_TOKENS = 2**17  # response tokens of a step that is timed by length
FEWEST = 4  # prompts
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
                done[changed] = run_case(changed, machine, steps, folder, False, **settings)["seconds"]
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


def by_length(case: Case) -> list[Case]:
    """The case with responses of each of `LENGTHS` that the model's context holds, and of all of it where it
    is longer; of so few prompts that a step has at most `STEP_TOKENS`, and at least `FEWEST`."""
    longest = SHAPES[case.size]["max_position_embeddings"] - case.prompt[1]
    lengths = [length for length in LENGTHS if length <= longest] + [longest] * (longest > LENGTHS[-1])
    return [
        replace(
            case,
            response=(length, length),
            batch=min(case.batch, max(FEWEST, STEP_TOKENS // (length * case.generations))),
        )
        for length in lengths
    ]


def run_lengths(
    case: Case, machine: Machine, steps: int, folder: str, **settings: object
) -> Iterator[Record]:
    """Each length's result as soon as it is there; where memory runs out, one with `error`."""
    for sized_case in by_length(case):
        try:
            found = run_case(sized_case, machine, steps, folder, False, **settings)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found = {**asdict(sized_case), "error": "out of memory"}
        free_memory()
        yield found


def lengths_table(found: list[Record]) -> str:
    """What a response token costs by length. The floor has attention's own share, which grows with it."""
    names = f"{'seconds':>10}{'floor':>9}{'ratio':>7}{'us per token':>14}{'GiB':>7}"
    lines = [f"  {'response':>10}{'batch':>7}{names}"]
    for result in found:
        head = f"  {result['response'][1]:>10}{result['batch']:>7}"
        if "error" in result:
            lines.append(f"{head}{result['error']:>17}")
            continue
        cost = 1e6 * result["seconds"] / result["response_tokens"]
        memory = "" if result["held_gib"] is None else f"{result['held_gib']:.1f}"
        lines.append(
            f"{head}{result['seconds']:>10.3f}{result['floor']['step']:>9.3f}"
            f"{result['ratio_to_floor']:>7.1f}{cost:>14.1f}{memory:>7}"
        )
    return "\n".join(lines)


def lengths_plot(found: list[Record]) -> Plot:
    """Microseconds per response token by the response's length, and the floor's; without those that did not
    fit."""
    found = [result for result in found if "error" not in result]
    series = [
        {
            "name": name,
            "points": [
                [result["response"][1], 1e6 * seconds(result) / result["response_tokens"]] for result in found
            ],
        }
        for name, seconds in (
            ("measured", lambda result: result["seconds"]),
            ("floor", lambda result: result["floor"]["step"]),
        )
    ]
    return Plot([{"title": "microseconds per response token", "x": "response tokens", "series": series}])
