"""A simulation of the pipeline. In: stages, what each needs and which resource it takes. Out: step time; who
is the busiest.

A resource does one thing at a time, in the order of steps. A stage starts when its resource is free and all
it needs is done: needing `update` of one step back is on-policy, of two steps back is rollouts made while the
update before runs (overlap).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage of a step."""

    name: str
    resource: str
    seconds: float
    needs: tuple[tuple[str, int], ...] = ()
    """(stage, how many steps before this one)."""


@dataclass(frozen=True)
class Timeline:
    """What a simulation found."""

    step_seconds: float
    """Between the ends of two steps, once it runs evenly."""
    busy: Mapping[str, float]
    """Share of its time that each resource works."""

    @property
    def bottleneck(self) -> str:
        return max(self.busy, key=lambda name: self.busy[name])


def simulate(stages: Sequence[Stage], steps: int = 50) -> Timeline:
    """Stages of a step in order; the first half of the steps is warm-up."""
    ends: dict[tuple[str, int], float] = {}
    free = dict.fromkeys((stage.resource for stage in stages), 0.0)
    for step in range(steps):
        for stage in stages:
            ready = max((ends.get((name, step - back), 0.0) for name, back in stage.needs), default=0.0)
            free[stage.resource] = ends[stage.name, step] = max(free[stage.resource], ready) + stage.seconds
    done = [max(ends[stage.name, step] for stage in stages) for step in range(steps)]
    period = (done[-1] - done[steps // 2]) / (steps - 1 - steps // 2)
    work = {name: sum(stage.seconds for stage in stages if stage.resource == name) for name in free}
    return Timeline(period, {name: seconds / period for name, seconds in work.items()})


def together(seconds: Mapping[str, float]) -> list[Stage]:
    """All phases on the same GPUs, one after another."""
    names, stages = list(seconds), []
    for i, name in enumerate(names):
        stages.append(Stage(name, "GPUs", seconds[name], ((names[i - 1], 0),) if i else ((names[-1], 1),)))
    return stages


def apart(seconds: Mapping[str, float], rollout: float, overlap: bool) -> list[Stage]:
    """Rollouts on GPUs of their own; `overlap`: they use the policy of one update earlier."""
    scored = sum(seconds[name] for name in ("score", "reward", "value"))
    return [
        Stage("generate", "rollout GPUs", rollout, (("update", 2 if overlap else 1),)),
        Stage("score", "training GPUs", scored, (("generate", 0),)),
        Stage("update", "training GPUs", seconds["update"], (("score", 0),)),
    ]
