"""Several runs in one comparison on the page. In: configs, states and metrics of runs. Out: what `proxima
compare` shows, and any other metric on request.

A run without a step is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxima.core.json_record import Record
from proxima.pages.comparison import columns_of, compared, curves, frontier, group_by_seed, notes, table
from proxima.pages.report import NOT_DRAWN, bounds
from proxima.pages.studio.studio_curves import Metrics
from proxima.runs import title_of


@dataclass(frozen=True)
class Member:
    """One run of a comparison."""

    name: str
    state: str
    config: Mapping[str, object]
    metrics: Metrics


def compare(members: Sequence[Member], more: Sequence[str] = ()) -> Record:
    """
    Args:
        more: metrics to draw in addition to the usual ones.
    Returns: `columns` and `rows` of the table, `groups` of seeds, `charts`, `notes`, and `more`: name and
        title of the metrics that are in no chart yet.
    """
    there = [member for member in members if member.metrics.get("step")]
    metrics = {member.name: member.metrics for member in there}
    configs = {member.name: member.config for member in there}
    groups = group_by_seed(configs)
    drawn = {*compared(), *more, *NOT_DRAWN}.union(*(bounds(each) for each in metrics.values()))
    left = {name for each in metrics.values() for name in each} - drawn
    return {
        "columns": columns_of(metrics) if metrics else {},
        "rows": table(metrics, groups, {member.name: member.state for member in there}),
        "groups": groups,
        "charts": [*frontier(metrics, groups), *curves(metrics, groups, more)],
        "notes": notes(configs),
        "more": {name: title_of(name) for name in sorted(left)},
    }
