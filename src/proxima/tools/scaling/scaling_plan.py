"""Ways to run a model on a number of GPUs.

In: a shape, a count, a batch. Out: memory, time and bottleneck of each way; the best of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxima.tools.scaling.model_shapes import ModelShape
from proxima.tools.scaling.pipeline_simulation import Timeline, apart, simulate, together
from proxima.tools.scaling.step_costs import (
    FAST,
    GIB,
    PLAIN,
    VLLM,
    Gpu,
    PhaseSeconds,
    StepWork,
    decode_step,
    memory,
    one_pass,
    phases,
)

HELD = 1.2  # memory the allocator reserves per byte in use (measured: 1.18 to 1.32)
STANDARD = StepWork()
H200 = Gpu()
CONTEXT = 1.5 * GIB  # CUDA, its libraries and captured graphs


@dataclass(frozen=True)
class ScalingPlan:
    """One way to run a step."""

    way: str
    gpus: int
    memory: float
    """Bytes on the fullest GPU."""
    fits: bool
    seconds: float
    """Per step."""
    bottleneck: str
    """The busiest resource, and what its longest phase spends most time on."""


def plans(shape: ModelShape, gpus: int, work: StepWork = STANDARD, gpu: Gpu = H200) -> list[ScalingPlan]:
    """All ways to use this many GPUs."""
    found = [_together(shape, gpus, work, gpu, again=again) for again in (False, True)]
    if gpus > 1:
        found += [_together(shape, gpus, work, gpu, sharded=True, again=again) for again in (False, True)]
        splits = sorted({max(1, gpus // 8), max(1, gpus // 4), gpus // 2})
        found += [
            _apart(shape, gpus, split, work, gpu, overlap) for split in splits for overlap in (False, True)
        ]
    return found


def best_plan(shape: ModelShape, gpus: int, work: StepWork = STANDARD, gpu: Gpu = H200) -> ScalingPlan:
    """The fastest that fits; if none does, the one that needs the least memory."""
    found = plans(shape, gpus, work, gpu)
    fitting = [plan for plan in found if plan.fits]
    return (
        min(fitting, key=lambda plan: plan.seconds) if fitting else min(found, key=lambda plan: plan.memory)
    )


def _together(
    shape: ModelShape, gpus: int, work: StepWork, gpu: Gpu, sharded: bool = False, again: bool = False
) -> ScalingPlan:
    engine = PLAIN if sharded else FAST  # the fast engine reads whole weights
    times = phases(shape, work, gpus, gpu, engine, sharded, again)
    need = _held(memory(shape, work, gpus, engine, sharded, again))
    way = ("sharded" if sharded else "replicated") + (", checkpointed" if again else "")
    return _plan(
        way, gpus, need, gpu, simulate(together({name: phase.total for name, phase in times.items()})), times
    )


def _apart(shape: ModelShape, gpus: int, split: int, work: StepWork, gpu: Gpu, overlap: bool) -> ScalingPlan:
    """`split` GPUs sample with vLLM, each group of them holding the model once; the others train, sharded
    where they must."""
    training = gpus - split
    ways = [
        (sharded, again)
        for sharded in (False, True)
        for again in (False, True)
        if training > 1 or not sharded
    ]
    needs = {way: _held(memory(shape, work, training, PLAIN if way[0] else FAST, *way)) for way in ways}
    sharded, again = next((way for way in ways if needs[way] <= gpu.memory), ways[-1])
    times = phases(shape, work, training, gpu, PLAIN if sharded else FAST, sharded, again)
    need = needs[sharded, again]
    group = next((size for size in (1, 2, 4, 8) if shape.weights * 2 / size < 0.7 * gpu.memory), 8)
    if split < group:
        need = float("inf")
        group = split
    share = work.batch / (split / group)
    rollout = _rollout(shape, share, work, gpu, group)
    times["generate"] = rollout
    way = (
        f"{split} sample, {training} train{' sharded' if sharded else ''}{', overlapped' if overlap else ''}"
    )
    line = simulate(apart({name: phase.total for name, phase in times.items()}, rollout.total, overlap))
    return _plan(way, gpus, max(need, shape.weights * 2 / group), gpu, line, times)


def _rollout(shape: ModelShape, share: float, work: StepWork, gpu: Gpu, group: int) -> PhaseSeconds:
    step = decode_step(shape, share, work, gpu, VLLM, group).parts
    prefill = one_pass(shape, share, work.prompt, gpu, VLLM.forward).parts
    parts = {
        name: work.response * step.get(name, 0.0) + prefill.get(name, 0.0) / group for name in step | prefill
    }
    return PhaseSeconds({**parts, "small kernels": parts["small kernels"] + VLLM.start})


def _plan(
    way: str, gpus: int, need: float, gpu: Gpu, line: Timeline, times: dict[str, PhaseSeconds]
) -> ScalingPlan:
    busiest = line.bottleneck
    split = {"rollout GPUs": ["generate"], "training GPUs": [name for name in times if name != "generate"]}
    own = split.get(busiest, list(times))
    longest = max(own, key=lambda name: times[name].total)
    why = max(times[longest].parts, key=lambda part: times[longest].parts[part])
    return ScalingPlan(
        way,
        gpus,
        need,
        need <= gpu.memory,
        line.step_seconds,
        f"{busiest} {line.busy[busiest]:.0%}: {longest}, {why}",
    )


def _held(parts: dict[str, float]) -> float:
    return HELD * sum(parts.values()) + CONTEXT
