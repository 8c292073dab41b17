"""Looking up metrics: a name as logged in, its declaration, title, unit and chart out.

The declarations are in `proxima.runs.metric_declarations`. Nothing heavy is imported here: reports, the
studio and the reference pages all read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from proxima.runs.metric_declarations import FINETUNING_METRICS, GROUPS, METRICS, Metric, MetricGroup

__all__ = [
    "FINETUNING",
    "GLOSSARY",
    "GROUPS",
    "Chart",
    "Metric",
    "MetricGroup",
    "chart_of",
    "charts_in_groups",
    "check_declared",
    "declare",
    "explain",
    "is_defined",
    "title_of",
    "unit_of",
    "with_unit",
    "without_backticks",
]

GLOSSARY: dict[str, Metric] = {metric.name: metric for metric in METRICS}
"""What a PPO run logs, by name, in the order of the pages; `declare` adds to it."""

FINETUNING: dict[str, Metric] = {metric.name: metric for metric in FINETUNING_METRICS}
"""What `proxima sft` and `proxima reward` measure every `eval_every` optimiser steps."""


def declare(*metrics: Metric) -> None:
    """Declare metrics of your own trainer, before it logs them. Pages that this process writes then show them
    with their titles and units."""
    for metric in metrics:
        if metric.name in GLOSSARY and GLOSSARY[metric.name] != metric:
            raise ValueError(f"the metric {metric.name!r} is declared already; choose another name")
        if metric.group not in GROUPS:
            raise ValueError(
                f"the group {metric.group!r} of the metric {metric.name!r} does not exist; choose one of "
                f"{', '.join(GROUPS)}"
            )
    GLOSSARY.update({metric.name: metric for metric in metrics})


def explain(name: str) -> Metric | None:
    """The declaration of a name, or of its family (`validation/reward/*` for `validation/reward/x`)."""
    parts = name.split("/")
    families = ["/".join(parts[:end]) + "/*" for end in range(len(parts) - 1, 0, -1)]
    return next((GLOSSARY[key] for key in (name, *families) if key in GLOSSARY), FINETUNING.get(name))


def is_defined(name: str) -> bool:
    return explain(name) is not None


def check_declared(names: Iterable[str]) -> None:
    """Refuse names that no declaration covers."""
    for name in names:
        if is_defined(name):
            continue
        near = get_close_matches(name, GLOSSARY, 1, 0.75)
        held_out = name.removeprefix("validation/")
        custom = f"custom/{name}" if held_out == name else f"validation/custom/{held_out}"
        meant = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"the metric {name!r} is not declared{meant} Declare it in proxima/runs/metric_declarations.py, "
            f"in your own code with proxima.runs.glossary.declare(Metric({name!r}, ...)), or log it as "
            f"{custom!r}"
        )


def title_of(name: str) -> str:
    """The declared title; in a family also what the name adds; the name itself where it is not declared."""
    metric = explain(name)
    if metric is None:
        return name
    own = name.removeprefix(metric.name.removesuffix("*"))
    return metric.title if name in (own, metric.name) else f"{metric.title}: {own}"


def unit_of(name: str) -> str:
    metric = explain(name)
    return metric.unit if metric else ""


def with_unit(name: str) -> str:
    """The title with its unit, for tables."""
    unit = unit_of(name)
    return f"{title_of(name)} ({unit})" if unit else title_of(name)


@dataclass(frozen=True)
class Chart:
    """Metrics that are drawn together."""

    title: str
    unit: str
    names: tuple[str, ...]


def chart_of(names: Sequence[str]) -> Chart:
    """One chart of some metrics, called by the chart that they share or by their own titles."""
    metrics = [explain(name) for name in names]
    shared = {metric.chart if metric else "" for metric in metrics}
    same = len(names) > 1 and len(shared) == 1 and shared != {""}
    title = shared.pop() if same else ", ".join(map(title_of, names))
    units = list(dict.fromkeys(unit for name in names if (unit := unit_of(name))))
    return Chart(title, ", ".join(units), tuple(names))


def charts_in_groups(names: Collection[str]) -> list[tuple[MetricGroup, list[Chart]]]:
    """All these metrics, each in one chart, in the order in which they are declared; groups without any are
    left out. Names that are not declared have charts of their own in the last group."""
    order = {name: place for place, name in enumerate(dict.fromkeys([*GLOSSARY, *FINETUNING]))}
    found: dict[str, dict[str, list[str]]] = {key: {} for key in GROUPS}

    def place(name: str) -> int:
        metric = explain(name)
        return order[metric.name] if metric else len(order)

    for name in sorted(names, key=place):  # stable: a family's members stay in their order
        metric = explain(name)
        charts = found[metric.group if metric else "custom"]
        charts.setdefault((metric.chart if metric else "") or title_of(name), []).append(name)
    return [
        (GROUPS[key], [Chart(title, unit_of(some[0]), tuple(some)) for title, some in charts.items()])
        for key, charts in found.items()
        if charts
    ]


def without_backticks(text: str) -> str:
    """For pages that show text as it is."""
    return text.replace("`", "")
