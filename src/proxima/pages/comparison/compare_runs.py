"""Several runs as one page.

In: run folders, win rates between them. Out: what the page and the table show, as plain values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from proxima.config import RewardSpec
from proxima.pages.comparison.comparison_page import write_page
from proxima.pages.comparison.seed_groups import group_by_seed, mean_curve, t_interval
from proxima.runs import Run, thin

POINTS = 600  # of a curve
FRONTIER_POINTS = 300
TEXTS = 20  # prompts shown with everybody's answers
NAN = math.nan

Column = Sequence[float]
Metrics = Mapping[str, Column]

# title, axis, metric, and the ends of its interval where it has one
CURVES = (
    ("Reward on held-out prompts", "score", "validation/reward", "_low", "_high"),
    ("Win rate against the reference", "share", "validation/win_rate", "_low", "_high"),
    ("Reward of the step's own samples", "score", "avg_reward", "", ""),
    ("KL on held-out prompts", "nats", "validation/kl", "", ""),
    ("KL", "nats", "kl", "", ""),
    ("Length on held-out prompts", "tokens", "validation/response_length", "", ""),
    ("Length", "tokens", "response_length", "", ""),
    ("Answers that end by themselves", "share", "eos_rate", "", ""),
    ("Different pairs of words", "share", "validation/distinct_2", "", ""),
    ("Repetition", "share", "validation/repetition", "", ""),
    ("Entropy", "nats a token", "entropy", "", ""),
    ("Explained variance of the value model", "share", "explained_variance", "", ""),
    ("Clipped tokens", "share", "clip_fraction", "", ""),
)
# columns of the table: metrics on held-out prompts where every run has them, else of the steps' own samples,
# never mixed
HELD_OUT = {
    "held-out reward": "validation/reward",
    "win rate": "validation/win_rate",
    "held-out KL": "validation/kl",
    "held-out length": "validation/response_length",
}
OWN_SAMPLES = {
    "reward": "avg_reward",
    "win rate": "validation/win_rate",
    "KL": "kl",
    "length": "response_length",
}


def compare_runs(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    read: Callable[[Any], Sequence[str]] | None = None,
    rewards: Sequence[RewardSpec] = (),
    judges: Sequence[RewardSpec] = (),
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """
    Args:
        out: where the HTML file goes; None = nowhere.
        read: held-out prompts for a tokenizer; None = compare what the folders hold, without loading a model.
        rewards: what answers are scored by; by default the runs' own, where they are the same.
        judges: who else says which of two answers is better.
        trust_remote_code: run Python code that comes with the runs' checkpoints.
    Returns: `rows` of the table, `groups`, `charts`, `notes`, `win_rates` by judge, `texts`, `problems`.
    """
    if len(folders) < 2:
        raise ValueError("comparing needs at least two runs: proxima compare runs/ONE runs/TWO")
    runs = named_runs(folders)
    metrics = {name: run.metrics() for name, run in runs.items()}
    if empty := [name for name, columns in metrics.items() if not columns["step"]]:
        raise ValueError(
            f"{runs[empty[0]].path} holds no metrics; is it the folder of a `proxima train` run?"
        )
    configs = {name: run.config for name, run in runs.items()}
    groups = group_by_seed(configs)
    result: dict[str, Any] = {
        "rows": table(metrics, groups, {name: run.state for name, run in runs.items()}),
        "groups": groups,
        "charts": [*frontier(metrics), *curves(metrics, groups)],
        "notes": notes(configs),
        "win_rates": {},
        "texts": [],
        "problems": [f"{name}: {problem}" for name, run in runs.items() for problem in run.problems],
    }
    if read is not None:
        from proxima.pages.comparison.run_win_rates import win_rates_between

        paths = {name: run.path for name, run in runs.items()}
        result["win_rates"], texts = win_rates_between(paths, read, rewards, judges, trust_remote_code)
        result["texts"] = texts[:TEXTS]
    if out is not None:
        write_page(Path(out), result, list(runs))
    return result


def named_runs(folders: Sequence[str | Path]) -> dict[str, Run]:
    """By the folder's name, or by as much of its path as tells them apart."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        doubled = next(folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1)
        raise ValueError(f"{doubled} is given twice; compare different runs")
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    names = ["/".join(path.parts[-parts:]) for path in paths]
    return {name: Run(folder, name) for name, folder in zip(names, folders, strict=True)}


def curves(
    metrics: Mapping[str, Metrics],
    groups: Mapping[str, Sequence[str]],
    wanted: Sequence[tuple[str, str, str, str, str]] = CURVES,
) -> list[dict[str, Any]]:
    """A chart a metric that any run has; a group is its mean with an interval, its runs are faint beside
    it."""
    charts = []
    grouped = {name for names in groups.values() for name in names}
    for title, axis, metric, low, high in wanted:
        having = {name: columns for name, columns in metrics.items() if _known(columns, metric)}
        series: list[dict[str, Any]] = []
        for group, names in groups.items():
            rows = mean_curve([_by_step(having[name], metric) for name in names if name in having], POINTS)
            if len([name for name in names if name in having]) > 1 and rows:
                points = thin([row[0] for row in rows], [row[1] for row in rows], POINTS)
                kept = {point[0] for point in points}
                series.append(
                    {"name": group, "points": points, "band": [[s, a, b] for s, _, a, b in rows if s in kept]}
                )
        for name, columns in having.items():
            steps = list(_by_step(columns, metric))
            points = thin(steps, list(_by_step(columns, metric).values()), POINTS)
            one: dict[str, Any] = {"name": name, "points": points, "faint": name in grouped}
            if low and name not in grouped and _known(columns, metric + low):
                ends = _by_step(columns, metric + low), _by_step(columns, metric + high)
                one["band"] = [[step, ends[0].get(step, NAN), ends[1].get(step, NAN)] for step in steps]
            series.append(one)
        if series:
            charts.append({"title": title, "x": "step", "y": axis, "series": series})
    return charts


def frontier(metrics: Mapping[str, Metrics]) -> list[dict[str, Any]]:
    """Reward against KL, a point an evaluation; a step where not every run had held-out prompts."""
    held_out = have_held_out(metrics)
    reward, kl = ("validation/reward", "validation/kl") if held_out else ("avg_reward", "kl")
    series = []
    for name, columns in metrics.items():
        if _known(columns, reward) and _known(columns, kl):
            rewards = _by_step(columns, reward)
            points = [
                [x, rewards[step], f"step {step:g}"]
                for step, x in _by_step(columns, kl).items()
                if step in rewards
            ]
            every = math.ceil(len(points) / FRONTIER_POINTS) or 1
            series.append({"name": name, "points": [*points[:-1:every], *points[-1:]]})
    title = "Reward against KL" + (" on held-out prompts" if held_out else "")
    note = (
        "Up is better, right is further from the reference: of two runs, the one above got more for the "
        "same distance."
    )
    return (
        [{"title": title, "note": note, "x": "KL (nats)", "y": "score", "series": series, "free": True}]
        if series
        else []
    )


def notes(configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a reader must know before scores are set against each other."""
    used = [config["rewards"] for config in configs.values() if "rewards" in config]
    if all(rewards == used[0] for rewards in used):
        return []
    return [
        "These runs were trained with different rewards: their scores have no common scale. "
        "`proxima compare` with --data and --rewards or --judges compares their answers."
    ]


def have_held_out(metrics: Mapping[str, Metrics]) -> bool:
    return all(_known(columns, "validation/reward") for columns in metrics.values())


def table(
    metrics: Mapping[str, Metrics], groups: Mapping[str, Sequence[str]], states: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A row a run with its last numbers, then a row a group with the mean of its runs' and the interval of
    it."""
    shown = HELD_OUT if have_held_out(metrics) else OWN_SAMPLES
    reward = next(iter(shown))
    rows: list[dict[str, Any]] = []
    for name, columns in metrics.items():
        best = max(filter(math.isfinite, columns.get(shown[reward], ())), default=None)
        last = {label: _last(columns, metric) for label, metric in shown.items()}
        rows.append(
            {
                "run": name,
                "state": states[name],
                "steps": int(columns["step"][-1]),
                f"best {reward}": best,
                **last,
            }
        )
    by_name = {row["run"]: row for row in rows}
    for group, names in groups.items():
        merged: dict[str, Any] = {
            "run": group,
            "state": "",
            "steps": max(by_name[name]["steps"] for name in names),
        }
        for label in (f"best {reward}", *shown):
            values = [by_name[name][label] for name in names if by_name[name][label] is not None]
            merged[label] = list(t_interval(values)) if len(values) > 1 else None
        rows.append(merged)
    return rows


def _by_step(columns: Metrics, metric: str) -> dict[float, float]:
    """The finite numbers of a metric by their step."""
    return {
        step: value
        for step, value in zip(columns["step"], columns[metric], strict=True)
        if math.isfinite(value)
    }


def _known(columns: Metrics, metric: str) -> bool:
    return metric in columns and any(map(math.isfinite, columns[metric]))


def _last(columns: Metrics, metric: str) -> float | None:
    return next((value for value in reversed(columns.get(metric, ())) if math.isfinite(value)), None)
