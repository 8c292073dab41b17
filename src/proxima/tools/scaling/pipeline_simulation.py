"""A simulation of the pipeline. In: phases, what each depends on and which resource it uses. Out: the step
time and the busiest resource.

A resource does one thing at a time, in the order of steps. A phase starts when its resource is free and all
its dependencies are done. Depending on the `update` of the previous step is on-policy; depending on the one
before that lets rollouts overlap with an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PipelinePhase:
    """One phase of a step."""

    name: str
    resource: str
    seconds: float
    needs: tuple[tuple[str, int], ...] = ()
    """(phase, how many steps earlier)."""


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation."""

    step_seconds: float
    """Between the ends of two steps, in the steady state."""
    busy: Mapping[str, float]
    """Share of the time that each resource is busy."""

    @property
    def bottleneck(self) -> str:
        return max(self.busy, key=lambda name: self.busy[name])


def simulate(phases: Sequence[PipelinePhase], steps: int = 50) -> Timeline:
    """Run the phases of a step in order; the first half of the steps is warm-up."""
    ends: dict[tuple[str, int], float] = {}
    free = dict.fromkeys((phase.resource for phase in phases), 0.0)
    for step in range(steps):
        for phase in phases:
            ready = max((ends.get((name, step - back), 0.0) for name, back in phase.needs), default=0.0)
            free[phase.resource] = ends[phase.name, step] = max(free[phase.resource], ready) + phase.seconds
    done = [max(ends[phase.name, step] for phase in phases) for step in range(steps)]
    period = (done[-1] - done[steps // 2]) / (steps - 1 - steps // 2)
    work = {name: sum(phase.seconds for phase in phases if phase.resource == name) for name in free}
    return Timeline(period, {name: seconds / period for name, seconds in work.items()})


def together(seconds: Mapping[str, float]) -> list[PipelinePhase]:
    """All phases on the same GPUs, one after another."""
    names = list(seconds)
    before = [(names[-1], 1), *((name, 0) for name in names[:-1])]
    return [
        PipelinePhase(name, "GPUs", seconds[name], (need,)) for name, need in zip(names, before, strict=True)
    ]


def apart(seconds: Mapping[str, float], rollout: float, overlap: bool) -> list[PipelinePhase]:
    """Rollouts on GPUs of their own; `overlap`: they use the policy of one update earlier."""
    scored = sum(seconds[name] for name in ("score", "reward", "value"))
    return [
        PipelinePhase("generate", "rollout GPUs", rollout, (("update", 2 if overlap else 1),)),
        PipelinePhase("score", "training GPUs", scored, (("generate", 0),)),
        PipelinePhase("update", "training GPUs", seconds["update"], (("score", 0),)),
    ]
