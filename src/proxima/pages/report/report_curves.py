"""Curves of a run in groups. In: metrics by name. Out: charts as `chart.js` draws them; every logged number
is in one.

Titles, units and groups come from the declarations of metrics. Numbers that never changed are no curve: they
are listed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from proxima.core.json_record import Record
from proxima.pages.report.short_numbers import short
from proxima.runs import (
    Metric,
    MetricGroup,
    chart_of,
    charts_in_groups,
    explain,
    thin,
    title_of,
    unit_of,
    without_backticks,
)

POINTS = 400  # of a curve
FRONTIER_POINTS = 60  # of held-out evaluations; of noisy training steps fewer, each the mean of several
TRAINING_POINTS = 20
MARKS = 20  # warnings drawn on a curve
MARKED = (
    "avg_reward",
    "kl",
    "validation/reward",
)  # warnings are drawn on charts that begin with one of these
NOT_DRAWN = ("step", "epoch")

BEST_OF_NOTE = (
    " Best of n: of n samples of the reference the one with the highest reward, with the bound "
    "log n - (n - 1)/n of its KL; it needs no training, but n samples for every answer."
)

SHOWN = 40  # characters of a constant answer

Metrics = Mapping[str, Sequence[float]]
Constants = Mapping[str, tuple[str, float]]
"""As `Run.best_constants` reads them: answer and score, by reward."""


def charts_by_group(
    metrics: Metrics, marks: Sequence[Record] = (), constants: Constants | None = None
) -> list[tuple[MetricGroup, list[Record]]]:
    """Groups that have something to draw, with their charts.

    Args:
        constants: the best constant answers of verifiable rewards, drawn beside the scores of these.
    """
    ends = bounds(metrics)
    wanted = [name for name in metrics if name not in NOT_DRAWN and name not in ends]
    found = []
    for group, charts in charts_in_groups(wanted):
        drawn = []
        for one in charts:
            names = one.names
            if len(names) == 1 and _same_as_whole(metrics, names[0]):
                continue
            if any(_changes(metrics[name]) for name in names) or "avg_reward" in names:
                made = chart(metrics, names, one.title, marks if names[0] in MARKED else ())
                drawn.append(_beside_constants(made, metrics, constants or {}))
        if drawn:
            found.append((group, drawn))
    return found


def chart(metrics: Metrics, names: Sequence[str], title: str = "", marks: Sequence[Record] = ()) -> Record:
    """One chart of some metrics, with what they mean; a long noisy curve is faint, with its running mean
    over it."""
    series: list[Record] = []
    width = 0
    for name in names:
        xs, ys = _known(metrics["step"], metrics[name])
        one: Record = {"name": name, "points": thin(xs, ys, POINTS), "band": _band(metrics, name)}
        if len(ys) >= 60 and _is_noisy(ys):
            width = len(ys) // 20
            one["trend"] = thin(xs, _smooth(ys, width), POINTS)
        series.append(one)
    declared = chart_of(names)
    calmer = f"The strong line is the running mean over {width} steps." if width else ""
    return {
        "title": title or declared.title,
        "note": f"{_note(names)} {calmer}".strip(),
        "about": meanings(names),
        "x": "step",
        "y": declared.unit,
        "series": series,
        "marks": list(marks)[:MARKS],
    }


def _beside_constants(made: Record, metrics: Metrics, constants: Constants) -> Record:
    """A chart of scores with a level line for each best constant answer."""
    shown = {one["name"] for one in made["series"]}
    for reward, (answer, score) in constants.items():
        name = f"reward/{reward}"
        alone = name in metrics and _same_as_whole(metrics, name) and "avg_reward" in shown
        if name in shown or alone:
            xs = [x for one in made["series"] for x, *_ in one["points"]]
            level = [[x, score] for x in ([min(xs), max(xs)] if xs else [])]
            made["series"].append(
                {"name": f"best constant answer of {reward}", "points": level, "faint": True}
            )
            made["note"] += f" The constant answer {answer[:SHOWN]!r} scores {short(score)} by {reward}."
    return made


def _note(names: Sequence[str]) -> str:
    """What the metrics mean, where one declaration covers them all; else which is which."""
    metrics = {metric for name in names if (metric := explain(name))}
    if len(metrics) == 1:
        return without_backticks(metrics.pop().meaning)
    return f"{', '.join(f'{title_of(name)} ({name})' for name in names)}." if metrics else ""


def meanings(names: Sequence[str]) -> list[dict[str, str]]:
    """What the declarations say of metrics, as plain text, a family's once; nothing of undeclared names."""
    found: dict[Metric, list[str]] = {}
    for name in names:
        if metric := explain(name):
            found.setdefault(metric, []).append(name)
    return [
        {
            "name": ", ".join(alike),
            "title": title_of(alike[0]) if len(alike) == 1 else metric.title,
            "unit": metric.unit,
            "meaning": without_backticks(metric.meaning),
            "healthy": without_backticks(metric.healthy),
            "otherwise": without_backticks(metric.otherwise),
        }
        for metric, alike in found.items()
    ]


def frontier(metrics: Metrics, evaluation: Mapping[str, object] | None = None) -> Record | None:
    """Reward gained against KL spent: held-out where there is such, else means over parts of training.

    Args:
        evaluation: what `proxima eval` wrote; its best-of-n of the reference is drawn beside the run.
    """
    held_out = "validation/reward" in metrics and "validation/kl" in metrics
    reward, kl = ("validation/reward", "validation/kl") if held_out else ("avg_reward", "kl_exact")
    if reward not in metrics or kl not in metrics:
        return None
    rows = [
        row
        for row in zip(metrics["step"], metrics[kl], metrics[reward], strict=True)
        if all(map(math.isfinite, row))
    ]
    if len(rows) < 2:
        return None
    parts = min(FRONTIER_POINTS, len(rows)) if held_out else min(TRAINING_POINTS, max(len(rows) // 3, 2))
    points = []
    for number in range(parts):
        part = rows[number * len(rows) // parts : (number + 1) * len(rows) // parts]
        steps = f"step {part[0][0]:g}" if len(part) == 1 else f"steps {part[0][0]:g} to {part[-1][0]:g}"
        points.append(
            [sum(row[1] for row in part) / len(part), sum(row[2] for row in part) / len(part), steps]
        )
    compared = best_of_series(evaluation or {})
    return {
        "title": "Held-out reward against KL" if held_out else "Training reward against KL",
        "note": "Each point is a part of the run, joined in order. Up is better, left is closer to the "
        "reference: a curve that moves right without rising gains nothing for its KL."
        + (BEST_OF_NOTE if compared else ""),
        "x": f"{title_of(kl)} ({unit_of(kl)})",
        "y": unit_of(reward),
        "free": True,
        "series": [{"name": "reward", "points": points}, *compared],
    }


def best_of_series(evaluation: Mapping[str, object]) -> list[Record]:
    """Best-of-n and the policy on the same prompts, as `proxima eval --best-of` measured them; what is not
    numbers is left out."""
    found = evaluation.get("best_of")
    rows = [
        [row["kl"], row["reward"], f"best of {row['n']:g}"]
        for row in (found if isinstance(found, list) else ())
        if isinstance(row, dict) and all(_is_number(row.get(name)) for name in ("n", "kl", "reward"))
    ]
    if not rows:
        return []
    policy = evaluation.get("policy")
    own = [policy.get(name) for name in ("kl_exact", "avg_reward")] if isinstance(policy, dict) else []
    after = [[*own, "the policy, by proxima eval"]] if own and all(map(_is_number, own)) else []
    series = {"best of n samples of the reference": rows, "the policy, by proxima eval": after}
    return [{"name": name, "points": points} for name, points in series.items() if points]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def interval_names(names: Collection[str], name: str) -> tuple[str, str] | None:
    """Where the ends of a metric's interval are: `x_low` and `x_high` for `x`, `a/x_low/b` and
    `a/x_high/b` for `a/x/b`."""
    start, slash, tail = name.rpartition("/")
    for low, high in (
        (f"{name}_low", f"{name}_high"),
        (f"{start}_low{slash}{tail}", f"{start}_high{slash}{tail}"),
    ):
        if low in names and high in names:
            return low, high
    return None


def bounds(names: Collection[str]) -> set[str]:
    """Those that are ends of intervals: drawn as a band, not as curves."""
    known = set(names)
    return {end for name in known for end in interval_names(known, name) or ()}


def _band(metrics: Metrics, name: str) -> list[list[float]]:
    ends = interval_names(metrics, name)
    if ends is None:
        return []
    rows = zip(metrics["step"], metrics[ends[0]], metrics[ends[1]], strict=True)
    known = [list(row) for row in rows if all(map(math.isfinite, row))]
    return known[:: max(len(known) // POINTS, 1)]


def _known(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Steps at which a metric was logged at all: of one that is measured seldom, the steps between are no
    gaps."""
    if sum(map(math.isnan, values)) * 2 < len(values):
        return list(steps), list(values)
    rows = [row for row in zip(steps, values, strict=True) if not math.isnan(row[1])]
    return [step for step, _ in rows], [value for _, value in rows]


def _is_noisy(ys: Sequence[float]) -> bool:
    """More up and down from step to step than over the whole curve."""
    finite = [y for y in ys if math.isfinite(y)]
    return len(finite) > 1 and sum(abs(b - a) for a, b in pairwise(finite)) > 4 * (max(finite) - min(finite))


def _smooth(ys: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` finite values; nan if there is none."""
    smooth = []
    total, count = 0.0, 0
    for place, y in enumerate(ys):
        old = ys[place - width] if place >= width else math.nan
        total += (y if math.isfinite(y) else 0.0) - (old if math.isfinite(old) else 0.0)
        count += math.isfinite(y) - math.isfinite(old)
        smooth.append(total / count if count else math.nan)
    return smooth


def constants(metrics: Metrics) -> dict[str, float]:
    """What was the same number at every step it was logged, of several."""
    kept = {}
    for name, values in metrics.items():
        known = {value for value in values if math.isfinite(value)}
        if len(known) == 1 and name not in ("step", "avg_reward"):
            kept[name] = known.pop()
    return kept


def _same_as_whole(metrics: Metrics, name: str) -> bool:
    """Whether a single reward by name is the reward itself, drawn already."""
    whole = {"reward": "avg_reward", "validation/reward": "validation/reward"}.get(
        name.rpartition("/")[0], name
    )
    if whole == name or whole not in metrics:
        return False
    return [x if math.isfinite(x) else None for x in metrics[whole]] == [
        x if math.isfinite(x) else None for x in metrics[name]
    ]


def _changes(values: Sequence[float]) -> bool:
    return len({value for value in values if math.isfinite(value)}) > 1
