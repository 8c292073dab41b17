"""Seconds and bytes of one GPU's share of a PPO step. In: a shape, a batch, the way it runs. Out: both, by
part.

A phase costs arithmetic at the rate of a large matrix product, memory traffic at the rate of a large copy,
and the time of small kernels. The constants of `FAST` are fitted to four measured points (docs/scaling.md,
`tests/tools/test_scaling.py`), those of `PLAIN` to measured passes of transformers in eager mode at 0.6B.
Link speeds are the vendors' figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proxima.tools.scaling.model_shapes import ModelShape

GIB = 2**30
BYTES = 2  # bfloat16
SLOTS = 256  # sequences generated at once, at most


@dataclass(frozen=True)
class Gpu:
    """One H200, as measured; links at 80 % of the vendor's figure."""

    flops: float = 787e12  # per second, a large bfloat16 product
    bandwidth: float = 4.15e12  # bytes per second, a large copy
    memory: float = 139 * GIB
    link: float = 0.8 * 450e9  # bytes per second to the others in the machine
    network: float = 0.8 * 50e9  # the same to other machines
    in_machine: int = 8


@dataclass(frozen=True)
class EngineCosts:
    """What a pass costs besides its arithmetic."""

    forward: float
    """Memory traffic of a layer's forward pass, as a multiple of the inputs and outputs of its maps."""
    train: float
    """The same for forward and backward."""
    decode: float
    """Seconds of small kernels, per layer and decode step."""
    start: float
    """Seconds of host work, per generation."""
    kept: float
    """Numbers kept for the backward pass, as a multiple of the inputs and outputs of all maps."""


FAST = EngineCosts(forward=6.2, train=17.0, decode=75e-6, start=0.04, kept=0.85)
PLAIN = EngineCosts(forward=17.0, train=56.0, decode=1.1e-3, start=0.04, kept=1.2)
# assumed to be as fast as the built-in engine
VLLM = EngineCosts(forward=6.2, train=0.0, decode=75e-6, start=0.04, kept=0.0)


@dataclass(frozen=True)
class StepWork:
    """What one PPO step computes."""

    batch: int = 64
    prompt: int = 512
    response: int = 53
    epochs: int = 4
    minibatches: int = 1
    rank: int = 16
    pass_tokens: int = 8192

    @property
    def length(self) -> int:
        return self.prompt + self.response


@dataclass
class PhaseSeconds:
    """The time of a phase, by what takes it."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def one_pass(
    shape: ModelShape, sequences: float, length: float, gpu: Gpu, traffic: float, times: int = 1
) -> PhaseSeconds:
    """A pass over whole sequences, without the head; with `times` 2 also the backward pass (adapters: to the
    inputs alone)."""
    tokens = sequences * length
    attention = 2 * sequences * length**2 * shape.heads * shape.head_size * shape.layers
    arithmetic = times * (2 * shape.layers * shape.layer_weights * tokens + attention) / gpu.flops
    return PhaseSeconds(
        {
            "arithmetic": arithmetic,
            "memory": traffic * tokens * shape.layers * shape.layer_widths * BYTES / gpu.bandwidth,
        }
    )


def decode_step(
    shape: ModelShape, sequences: float, work: StepWork, gpu: Gpu, engine: EngineCosts, split: int = 1
) -> PhaseSeconds:
    """One token for each of these sequences; `split` GPUs share the weights (tensor parallel)."""
    weights = shape.layers * shape.layer_weights + shape.head_weights
    read = (
        (BYTES * weights + sequences * (work.prompt + work.response / 2) * shape.cached * BYTES)
        / split
        / gpu.bandwidth
    )
    arithmetic = 2 * sequences * weights / split / gpu.flops
    parts = {"memory": read} if read >= arithmetic else {"arithmetic": arithmetic}
    exchange = 0.0 if split == 1 else shape.layers * 2 * (sequences * shape.hidden * BYTES / gpu.link + 10e-6)
    return PhaseSeconds({**parts, "small kernels": engine.decode * shape.layers, "exchange": exchange})


def phases(
    shape: ModelShape,
    work: StepWork,
    gpus: int,
    gpu: Gpu,
    engine: EngineCosts,
    sharded: bool = False,
    again: bool = False,
) -> dict[str, PhaseSeconds]:
    """Each phase on `gpus` GPUs that share the batch: the time of one for its share, plus communication.

    Args:
        sharded: every pass fetches each layer's weights from the other GPUs.
        again: layers are recomputed in the backward pass (gradient_checkpointing).
    """
    share = work.batch / gpus
    written = share * work.response
    head = 2 * shape.head_weights * written / gpu.flops
    passes = max(1.0, share / work.minibatches * work.length / work.pass_tokens) * work.minibatches
    rate = gpu.link if gpus <= gpu.in_machine else gpu.network
    gather = 0.0  # all-gather of all layers for one pass
    if sharded:
        gather = (gpus - 1) / gpus * shape.layers * shape.layer_weights * BYTES / rate
    adapters = 0.0 if gpus == 1 else 2 * 4 * shape.adapter_weights(work.rank) / rate  # there and back

    def forward() -> PhaseSeconds:
        return one_pass(shape, share, work.length, gpu, engine.forward)

    def train() -> PhaseSeconds:
        done = one_pass(shape, share, work.length, gpu, engine.train, 2)
        done = _added(done, forward(), 1, {}) if again else done
        done.parts["arithmetic"] += head  # the policy's, forward and backward, split evenly over both roles
        return done

    step = decode_step(shape, share, work, gpu, engine)
    generate = one_pass(shape, share, work.prompt, gpu, engine.forward)
    generate = _added(generate, step, work.response, {"small kernels": engine.start})
    score = _added(forward(), forward(), 1, {"arithmetic": 2 * head})
    update = _added(
        PhaseSeconds(), train(), 2 * work.epochs, {"exchange": 2 * adapters * work.epochs * work.minibatches}
    )
    return {
        "generate": _overlapped(generate, gather * (1 + work.response)),
        "score": _overlapped(score, 2 * gather * passes),
        "reward": _overlapped(forward(), gather * passes),
        "value": _overlapped(forward(), gather * passes),
        "update": _overlapped(update, 2 * 2 * gather * passes * work.epochs),
    }


def _added(first: PhaseSeconds, second: PhaseSeconds, times: float, more: dict[str, float]) -> PhaseSeconds:
    names = first.parts | second.parts | more
    return PhaseSeconds(
        {n: first.parts.get(n, 0.0) + times * second.parts.get(n, 0.0) + more.get(n, 0.0) for n in names}
    )


def _overlapped(phase: PhaseSeconds, exchange: float) -> PhaseSeconds:
    """Layers are fetched while others compute: only the time beyond the computing counts."""
    seen = max(0.0, exchange - phase.total)
    return PhaseSeconds({**phase.parts, "exchange": phase.parts.get("exchange", 0.0) + seen})


def memory(
    shape: ModelShape,
    work: StepWork,
    gpus: int,
    engine: EngineCosts,
    sharded: bool = False,
    checkpointed: bool = False,
) -> dict[str, float]:
    """Bytes on one GPU at the peak of a step, LoRA adapters for policy and value model."""
    share = max(1.0, work.batch / gpus)
    sequences = max(1.0, share / work.minibatches)
    count = max(1, -(-int(sequences * work.length) // work.pass_tokens))
    tokens = max(work.length, sequences * work.length / count)
    layers = shape.layers * shape.layer_weights * BYTES
    rest = (shape.weights - shape.layers * shape.layer_weights) * BYTES
    adapters = 2 * shape.adapter_weights(work.rank)
    inside = engine.kept * shape.layer_widths * BYTES
    kept = inside + 2 * shape.layers * shape.hidden * BYTES if checkpointed else inside * shape.layers
    return {
        "weights": (layers / gpus + 2 * layers / shape.layers if sharded else layers) + rest,
        "adapters": 16.0 * adapters,
        "activations": tokens * kept,
        "cache": min(share, SLOTS) * work.length * shape.cached * BYTES,
        "logits": 4 * min(1024, sequences * work.response) * shape.vocabulary * 4,
    }
