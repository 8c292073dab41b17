"""Runs over each other on the page. In: configs, states and metrics of several runs. Out: what `proxima
compare` shows.

Any other metric may be asked for beside it. A run without a step is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxima.pages.comparison.compare_runs import CURVES, curves, frontier, notes, table
from proxima.pages.comparison.seed_groups import group_by_seed
from proxima.pages.report.report_curves import NOT_DRAWN, bounds
from proxima.pages.studio.studio_curves import Metrics


@dataclass(frozen=True)
class Member:
    """One run of a comparison."""

    name: str
    state: str
    config: Mapping[str, Any]
    metrics: Metrics


def compare(members: Sequence[Member], more: Sequence[str] = ()) -> dict[str, Any]:
    """
    Args:
        more: metrics to draw beside the usual ones.
    Returns: `rows` of the table, `groups` of seeds, `charts`, `notes`, and the `names` of metrics that are in
        no chart yet.
    """
    there = [member for member in members if member.metrics.get("step")]
    metrics = {member.name: member.metrics for member in there}
    configs = {member.name: member.config for member in there}
    groups = group_by_seed(configs)
    wanted = (*CURVES, *((name, "", name, "", "") for name in more))
    drawn = {metric for _, _, metric, _, _ in wanted}.union(
        NOT_DRAWN, *(bounds(each) for each in metrics.values())
    )
    return {
        "rows": table(metrics, groups, {member.name: member.state for member in there}),
        "groups": groups,
        "charts": [*frontier(metrics), *curves(metrics, groups, wanted)],
        "notes": notes(configs),
        "names": sorted({name for each in metrics.values() for name in each} - drawn),
    }
