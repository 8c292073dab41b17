"""`proxima compare`: what is compared between runs, as plain values.

In: run folders, win rates between them. Out: what the page and the table show, as plain values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from proxima.config import RewardSpec
from proxima.core.json_record import Record
from proxima.core.tokenizer import Tokenizer
from proxima.pages.comparison.comparison_page import write_page
from proxima.pages.comparison.seed_groups import group_by_seed, mean_curve, t_interval
from proxima.pages.report import interval_names, meanings
from proxima.runs import GLOSSARY, Run, judges_in, thin, title_of, unit_of, with_unit

POINTS = 600  # of a curve
FRONTIER_POINTS = 300
TEXTS = 20  # prompts shown with everybody's answers
NAN = math.nan

Column = Sequence[float]
Metrics = Mapping[str, Column]

# columns of the table: held-out metrics where every run has them, else those of the steps, never mixed
HELD_OUT = ("validation/reward", "validation/win_rate", "validation/kl", "validation/response_length")
TRAINING = ("avg_reward", "validation/win_rate", "kl", "response_length")


def compare_runs(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    read: Callable[[Tokenizer], Sequence[str]] | None = None,
    rewards: Sequence[RewardSpec] = (),
    judges: Sequence[RewardSpec] = (),
    trust_remote_code: bool = False,
    environment: Sequence[RewardSpec] = (),
    tools: Sequence[RewardSpec] = (),
) -> Record:
    """
    Args:
        out: where the HTML file goes; None = nowhere.
        read: held-out prompts for a tokenizer; None = compare what the folders hold, without loading a model.
        rewards: what answers are scored by; by default the runs' own, where they are the same.
        judges: who else says which of two answers is better.
        trust_remote_code: run Python code that comes with the runs' checkpoints.
        environment, tools: those of the runs, which are used only where they are given here.
    Returns: `columns` and `rows` of the table, `groups`, `charts`, `notes`, `win_rates` by judge, `texts`,
        `problems`.
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
    result: Record = {
        "columns": columns_of(metrics),
        "rows": table(metrics, groups, {name: run.state for name, run in runs.items()}),
        "groups": groups,
        "charts": [*frontier(metrics, groups), *curves(metrics, groups)],
        "notes": notes(configs),
        "win_rates": {},
        "texts": [],
        "problems": [f"{name}: {problem}" for name, run in runs.items() for problem in run.problems],
    }
    if read is not None:
        from proxima.pages.comparison.run_win_rates import win_rates_between as between

        paths = {name: run.path for name, run in runs.items()}
        rates, texts = between(paths, read, rewards, judges, trust_remote_code, environment, tools)
        result |= {"win_rates": rates, "texts": texts[:TEXTS]}
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


def compared() -> list[str]:
    """Metrics that every comparison draws."""
    return [name for name, metric in GLOSSARY.items() if metric.compared]


def curves(
    metrics: Mapping[str, Metrics], groups: Mapping[str, Sequence[str]], more: Sequence[str] = ()
) -> list[Record]:
    """One chart per metric that any run has.

    Args:
        more: metrics to draw after those that every comparison draws.
    """
    charts = []
    colours = _colours(metrics, groups)
    for metric in (*compared(), *more):
        having = {name: columns for name, columns in metrics.items() if _known(columns, metric)}
        if having:
            charts.append(
                {
                    "title": title_of(metric),
                    "about": meanings([metric]),
                    "x": "step",
                    "y": unit_of(metric),
                    "series": [
                        {**one, "colour": colours[one["name"]]}
                        for one in (
                            *_group_curves(having, metric, groups),
                            *_run_curves(having, metric, groups),
                        )
                    ],
                }
            )
    return charts


def _colours(metrics: Mapping[str, Metrics], groups: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The same colour for a run in every chart, whichever metrics it has."""
    return {name: place for place, name in enumerate((*groups, *metrics))}


def _group_curves(
    having: Mapping[str, Metrics], metric: str, groups: Mapping[str, Sequence[str]]
) -> Iterator[Record]:
    """Each group's mean with an interval, where two of its runs have the metric."""
    for group, names in groups.items():
        members = [_by_step(having[name], metric) for name in names if name in having]
        rows = mean_curve(members, POINTS) if len(members) > 1 else []
        if rows:
            points = thin([row[0] for row in rows], [row[1] for row in rows], POINTS)
            kept = {point[0] for point in points}
            band = [[step, low, high] for step, _, low, high in rows if step in kept]
            yield {"name": group, "points": points, "band": band}


def _run_curves(
    having: Mapping[str, Metrics], metric: str, groups: Mapping[str, Sequence[str]]
) -> Iterator[Record]:
    """Each run with the interval it logged; the runs of a group are faint and have none."""
    grouped = {name for names in groups.values() for name in names}
    for name, columns in having.items():
        values = _by_step(columns, metric)
        steps = list(values)
        one: Record = {"name": name, "points": thin(steps, list(values.values()), POINTS)}
        one["faint"] = name in grouped
        ends = interval_names(columns, metric)
        if ends and name not in grouped:
            low, high = (_by_step(columns, end) for end in ends)
            one["band"] = [[step, low.get(step, NAN), high.get(step, NAN)] for step in steps]
        yield one


def frontier(metrics: Mapping[str, Metrics], groups: Mapping[str, Sequence[str]]) -> list[Record]:
    """Reward against KL, and win rates by judges that all runs have: one point per evaluation, or per step
    where not every run had held-out prompts."""
    if not have_held_out(metrics):
        charts = [_frontier(metrics, groups, "avg_reward", "kl", "Training reward against KL")]
    else:
        titles = {"validation/reward": "Held-out reward against KL"}
        for name in judges_in(
            dict.fromkeys(name for columns in metrics.values() for name in columns), "validation/"
        ):
            if all(_known(columns, name) for columns in metrics.values()):
                titles[name] = f"{title_of(name)} against KL"
        charts = [_frontier(metrics, groups, name, "validation/kl", title) for name, title in titles.items()]
    return [chart for chart in charts if chart["series"]]


def _frontier(
    metrics: Mapping[str, Metrics], groups: Mapping[str, Sequence[str]], quality: str, kl: str, title: str
) -> Record:
    both = {
        name: (_by_step(columns, kl), _by_step(columns, quality))
        for name, columns in metrics.items()
        if _known(columns, quality) and _known(columns, kl)
    }
    colours = _colours(metrics, groups)
    grouped = {name for names in groups.values() for name in names}
    series: list[Record] = []
    for group, names in groups.items():
        members = [both[name] for name in names if name in both]
        where = {step: mean for step, mean, _, _ in mean_curve([spent for spent, _ in members])}
        rows = [
            (where[step], mean, low, high, step)
            for step, mean, low, high in mean_curve([gained for _, gained in members], FRONTIER_POINTS)
            if step in where
        ]
        if len(members) > 1 and rows:
            points = [[x, mean, f"step {step:g}, mean"] for x, mean, _, _, step in rows]
            band = [[x, low, high] for x, _, low, high, _ in rows]
            series.append({"name": group, "points": points, "band": band, "colour": colours[group]})
    for name, (spent, gained) in both.items():
        points = [[x, gained[step], f"step {step:g}"] for step, x in spent.items() if step in gained]
        every = math.ceil(len(points) / FRONTIER_POINTS) or 1
        shown = [*points[:-1:every], *points[-1:]]
        series.append({"name": name, "points": shown, "colour": colours[name], "faint": name in grouped})
    over_seeds = " Of several seeds, the mean at each step and its 95 % interval." if grouped else ""
    return {
        "title": title,
        "note": "Up is better, right is further from the reference: of two runs at the same KL, the upper "
        f"one is better.{over_seeds}",
        "x": with_unit(kl),
        "y": unit_of(quality),
        "series": series,
        "free": True,
    }


def notes(configs: Mapping[str, Mapping[str, object]]) -> list[str]:
    """What a reader must know before comparing scores."""
    used = [config["rewards"] for config in configs.values() if "rewards" in config]
    if all(rewards == used[0] for rewards in used):
        return []
    return [
        "These runs were trained with different rewards: their scores have no common scale. "
        "To compare their responses instead, run proxima compare with --data and --rewards or --judges."
    ]


def have_held_out(metrics: Mapping[str, Metrics]) -> bool:
    return all(_known(columns, "validation/reward") for columns in metrics.values())


def columns_of(metrics: Mapping[str, Metrics]) -> dict[str, str]:
    """The table's columns: key in a row -> title."""
    shown = HELD_OUT if have_held_out(metrics) else TRAINING
    fixed = {"run": "Run", "state": "State", "steps": "Steps", "best": f"Best {title_of(shown[0]).lower()}"}
    return fixed | {name: title_of(name) for name in shown}


def table(
    metrics: Mapping[str, Metrics], groups: Mapping[str, Sequence[str]], states: Mapping[str, str]
) -> list[Record]:
    """One row per run with its last numbers, then one per group with the mean over its runs and its
    interval."""
    shown = HELD_OUT if have_held_out(metrics) else TRAINING
    rows: list[Record] = []
    for name, columns in metrics.items():
        best = max(filter(math.isfinite, columns.get(shown[0], ())), default=None)
        row: Record = {"run": name, "state": states[name], "steps": int(columns["step"][-1]), "best": best}
        rows.append(row | {metric: _last(columns, metric) for metric in shown})
    by_name = {row["run"]: row for row in rows}
    for group, names in groups.items():
        members = [by_name[name] for name in names]
        merged: Record = {"run": group, "state": "", "steps": max(row["steps"] for row in members)}
        for key in ("best", *shown):
            values = [row[key] for row in members if row[key] is not None]
            merged[key] = list(t_interval(values)) if len(values) > 1 else None
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
