"""The least time a step can take, from this machine's measured bandwidth and FLOP/s.

In: shapes, and two ceilings measured on this machine. Out: seconds per phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from proxima.core.json_record import Record
from proxima.core.nf4 import NF4_BYTES

if TYPE_CHECKING:
    from proxima.tools.bench.bench_case import Case
    from proxima.tools.bench.finetuning_case import FinetuningCase


@dataclass(frozen=True)
class Machine:
    """The measured ceilings of a machine."""

    name: str
    flops: float  # per second, of a large matrix product in the dtype used
    bandwidth: float  # bytes per second, read and written, of a large copy


def measure_machine() -> Machine:
    gpu = torch.cuda.is_available()
    device, dtype, size = ("cuda", torch.bfloat16, 8192) if gpu else ("cpu", torch.float32, 1536)
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    flops = 2 * size**3 / _seconds(lambda: a @ b, gpu)
    source = torch.randn(2**28 if gpu else 2**24, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() * 4 / _seconds(lambda: target.copy_(source), gpu)
    return Machine(
        torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads", flops, bandwidth
    )


def _seconds(work: Callable[[], object], gpu: bool) -> float:
    """The best of a few timings."""
    best = float("inf")
    for _ in range(8):
        if gpu:
            torch.accelerator.synchronize()
        started = time.perf_counter()
        work()
        if gpu:
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def floors(case: Case, shape: Record, response: float, machine: Machine) -> dict[str, float]:
    """Seconds of each phase if only its arithmetic, or its memory traffic, took time."""
    size = 4 if machine.name.startswith("CPU") else 2
    cached = shape["num_key_value_heads"] * shape["head_dim"]
    body, head = _weights(shape)
    prompt = sum(case.prompt) / 2
    written = case.responses * response

    one_pass = _pass_flops(shape, case.responses, prompt + response)
    prefill = _pass_flops(shape, case.batch, prompt)
    cache = 2 * shape["num_hidden_layers"] * cached * size
    read = NF4_BYTES if case.quantize == "nf4" else size  # per weight of a layer, in a decode step
    step_bytes = read * body + size * head + case.responses * (prompt + response / 2) * cache
    step_flops = 2 * case.responses * (body + head)
    decode = max(step_bytes / machine.bandwidth, step_flops / machine.flops)
    policy_and_reference = 2 * one_pass + 4 * head * written
    critic = one_pass if case.generations == 1 else 0.0  # groups need neither reward nor value model
    # forward, and backward to the inputs
    train = 2 * (one_pass + critic) + 2 * 2 * head * written
    seconds = {
        "generate": prefill / machine.flops + response * decode,
        "decode_step": decode,
        "score": policy_and_reference / machine.flops,
        "reward": critic / machine.flops,
        "value": critic / machine.flops,
        "update": case.epochs * train / machine.flops,
    }
    return {**seconds, "step": sum(value for name, value in seconds.items() if name != "decode_step")}


def finetuning_floor(case: FinetuningCase, shape: Record, machine: Machine) -> float:
    """Seconds of an optimiser step if only its arithmetic took time: forward, and backward to the inputs."""
    flops = 2 * _pass_flops(shape, case.sequences, case.prompt + case.response)
    if case.kind == "sft":
        flops += 2 * 2 * _weights(shape)[1] * case.batch * case.response
    return flops / machine.flops


def _weights(shape: Record) -> tuple[int, int]:
    """Weights that a token is multiplied with: of all layers, and of the head."""
    heads = shape["num_attention_heads"] * shape["head_dim"]
    cached = shape["num_key_value_heads"] * shape["head_dim"]
    layer = shape["hidden_size"] * (2 * heads + 2 * cached + 3 * shape["intermediate_size"])
    return shape["num_hidden_layers"] * layer, shape["vocab_size"] * shape["hidden_size"]


def _pass_flops(shape: Record, rows: int, length: float) -> float:
    """Of a forward pass through all layers. Attention is causal: half of 4 B T T D."""
    heads = shape["num_attention_heads"] * shape["head_dim"]
    attention = 2 * rows * length**2 * heads * shape["num_hidden_layers"]
    return 2 * _weights(shape)[0] * rows * length + attention
