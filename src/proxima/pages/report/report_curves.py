"""Curves of a run in groups. In: metrics by name. Out: charts as `chart.js` draws them; every logged number
is in one.

Numbers that never changed are no curve: they are listed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from proxima.runs import thin
from proxima.runs.glossary import Metric, explain, plain

POINTS = 400  # of a curve
FRONTIER_POINTS = 60  # of held-out evaluations; of noisy training steps fewer, each the mean of several
TRAINING_POINTS = 20
MARKS = 20  # warnings drawn on a curve

Metrics = Mapping[str, Sequence[float]]
Mark = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Charts that answer one question."""

    title: str
    text: str
    charts: tuple[tuple[str, str, tuple[str, ...]], ...]
    """Title, unit and metrics of each; a name that ends in * takes all that begin so."""


GROUPS = (
    Group(
        "Did it get better?",
        "The score that training was asked to raise: on the prompts of each step and, where there are any, "
        "on held-out ones.",
        (
            ("Reward in training", "score", ("avg_reward",)),
            ("Reward on held-out prompts", "score", ("validation/reward",)),
            ("Win rate against the start", "share", ("validation/win_rate", "validation/win_rate/*")),
            ("Each reward by name", "score", ("reward/*",)),
            ("Each reward on held-out prompts", "score", ("validation/reward/*",)),
        ),
    ),
    Group(
        "How far did it go?",
        "Distance from the model it started as. A little is how it learns; a lot is often a trick that "
        "fools the reward.",
        (
            ("Distance (KL)", "nats", ("kl", "kl_exact")),
            ("Distance on held-out prompts", "nats", ("validation/kl",)),
            ("Price of distance", "coefficient", ("kl_coef",)),
            ("Entropy: how undecided it is", "nats a token", ("entropy",)),
        ),
    ),
    Group(
        "What do its texts look like?",
        "Length, endings and repetition: the first places where a model that games its reward shows it.",
        (
            ("Length", "tokens", ("response_length", "validation/response_length")),
            ("Texts that end by themselves", "share", ("eos_rate", "validation/eos_rate")),
            ("Different words", "share", ("validation/distinct*",)),
            ("Repetition", "share", ("validation/repetition*",)),
            ("Spread of the rewards", "score", ("reward_std",)),
        ),
    ),
    Group(
        "Was the update healthy?",
        "Small ratios, little clipping and steady gradients are what a sound PPO update shows.",
        (
            ("Policy loss", "loss", ("policy_loss",)),
            ("Tokens clipped", "share", ("clip_fraction",)),
            ("Change inside an update", "nats a token", ("approx_kl",)),
            ("Largest ratio", "ratio", ("ratio_max",)),
            ("Gradient of the policy", "norm", ("grad_norm_policy",)),
            ("Learning rates", "rate", ("learning_rate", "value_learning_rate")),
            ("Updates skipped", "updates", ("skipped_updates",)),
            ("Alarms", "guards", ("alarms",)),
        ),
    ),
    Group(
        "Does the value model follow?",
        "It predicts what a text will earn; advantages are measured against it.",
        (
            ("Value loss", "loss", ("value_loss",)),
            ("Explained variance", "share", ("explained_variance",)),
            ("Value and return", "score", ("value_mean", "return_mean")),
            ("Spread of the advantages", "score", ("advantage_std",)),
            ("Gradient of the value model", "norm", ("grad_norm_value",)),
        ),
    ),
    Group(
        "Where did the time go?",
        "Seconds of each stage of a step.",
        (
            ("Time of a step", "seconds", ("seconds",)),
            ("Time by stage", "seconds", ("seconds/*",)),
            ("Tokens", "tokens", ("tokens",)),
        ),
    ),
)
REST = Group("Everything else", "Counts, sizes, and measures of your own.", ())
NOT_DRAWN = ("step", "epoch")


def charts_by_group(metrics: Metrics, marks: Sequence[Mark] = ()) -> list[tuple[Group, list[Any]]]:
    """Groups that have something to draw, with their charts."""
    drawn: set[str] = set(NOT_DRAWN)
    found = []
    for group in GROUPS:
        charts = []
        for title, unit, wanted in group.charts:
            names = [name for want in wanted for name in _matching(metrics, want) if name not in drawn]
            drawn |= set(names)
            names = names if len(names) > 1 else [name for name in names if not _same_as_whole(metrics, name)]
            if any(_changes(metrics[name]) for name in names) or "avg_reward" in names:
                shown = marks if names[0] in ("avg_reward", "kl", "validation/reward") else ()
                charts.append(chart(metrics, names, title, unit, shown))
        if charts:
            found.append((group, charts))
    drawn |= bounds(metrics)
    rest = [name for name in metrics if name not in drawn and _changes(metrics[name])]
    if rest:
        found.append((REST, [chart(metrics, [name], name, "") for name in rest]))
    return found


def chart(
    metrics: Metrics, names: Sequence[str], title: str, unit: str, marks: Sequence[Mark] = ()
) -> dict[str, Any]:
    """One chart of some metrics, with what they mean; a long noisy curve is faint, with its running mean
    over it."""
    series, width = [], 0
    for name in names:
        xs, ys = _known(metrics["step"], metrics[name])
        one: dict[str, Any] = {"name": name, "points": thin(xs, ys, POINTS), "band": _band(metrics, name)}
        if len(ys) >= 60 and _is_noisy(ys):
            width = len(ys) // 20
            one["trend"] = thin(xs, _smooth(ys, width), POINTS)
        series.append(one)
    first = explain(names[0])
    note = plain(first.meaning) if first else ""
    calmer = f"The strong line is the mean of {width} steps." if width else ""
    return {
        "title": title,
        "note": f"{note} {calmer}".strip(),
        "about": meanings(names),
        "x": "step",
        "y": unit,
        "series": series,
        "marks": list(marks)[:MARKS],
    }


def meanings(names: Sequence[str]) -> list[dict[str, str]]:
    """What the glossary says of metrics, as plain text, a family's once; nothing of measures of one's own."""
    found: dict[Metric, list[str]] = {}
    for name in names:
        if metric := explain(name):
            found.setdefault(metric, []).append(name)
    return [
        {"name": ", ".join(alike), **{key: plain(text) for key, text in asdict(metric).items()}}
        for metric, alike in found.items()
    ]


def frontier(metrics: Metrics) -> dict[str, Any] | None:
    """What was gained for each nat of distance: held-out where there is such, else means over stretches of
    training."""
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
    stretches = min(FRONTIER_POINTS, len(rows)) if held_out else min(TRAINING_POINTS, max(len(rows) // 3, 2))
    points = []
    for number in range(stretches):
        part = rows[number * len(rows) // stretches : (number + 1) * len(rows) // stretches]
        steps = f"step {part[0][0]:g}" if len(part) == 1 else f"steps {part[0][0]:g} to {part[-1][0]:g}"
        points.append(
            [sum(row[1] for row in part) / len(part), sum(row[2] for row in part) / len(part), steps]
        )
    where = "on held-out prompts" if held_out else "in training"
    return {
        "title": f"Reward against distance, {where}",
        "note": "Each point is a stretch of the run, joined in order. Up is better, left is closer to the "
        "start: "
        "a curve that goes on to the right without rising pays distance for nothing.",
        "x": "KL (nats)",
        "y": "reward",
        "free": True,
        "series": [{"name": "reward", "points": points}],
    }


def _matching(metrics: Metrics, wanted: str) -> list[str]:
    if not wanted.endswith("*"):
        return [wanted] if wanted in metrics else []
    return [name for name in metrics if name.startswith(wanted[:-1]) and name not in bounds(metrics)]


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
    """Mean of the last `width` finite values; nan where there is none."""
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
