"""Compiles kernels side by side before their first use: one after another they take longer than a small run.

Each call runs one kernel on a few rows with the shapes of a decoder, so that Triton finds it compiled later.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from proxima.runtime.engine.kernels import attention_kernels, gate_kernels, head_kernels, norm_kernels
from proxima.runtime.engine.layer_weights import kinds_of
from proxima.runtime.engine.layout import tile_table

if TYPE_CHECKING:
    from proxima.runtime.engine.decoder import Decoder

ROWS = 64
Call = Callable[[], object]


def run_together(calls: list[Call], device: torch.device) -> None:
    """Run the calls in threads; an error of one is raised when all have ended."""

    def run(call: Call) -> None:
        with torch.cuda.device(device), torch.no_grad():
            call()

    with ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1)) as pool:
        begun = [pool.submit(run, call) for call in calls]
    for call in begun:
        call.result()
    torch.accelerator.synchronize(device)


def training_calls(decoder: Decoder) -> list[Call]:
    """The kernels of a pass and its backward pass, for a decoder whose functions are kernels."""
    shape, block, weight = decoder.shape, decoder.blocks[0], decoder.weight
    heads, keys, size = shape.heads, shape.kv_heads, shape.head_size
    x, angles = weight.new_zeros(ROWS, len(weight)), weight.new_zeros(ROWS, size)
    qkv, wide = (weight.new_zeros(ROWS, sum(part.sizes)) for part in (block.qkv, block.up))
    padded = weight.new_zeros(ROWS, heads * size + block.out.padding)
    both = weight.new_zeros(ROWS, heads + keys, size)
    q, k, v = both[:, :heads], both[:, heads:], qkv[:, (heads + keys) * size :].unflatten(1, (-1, size))
    tiles = torch.from_numpy(tile_table([ROWS])).to(weight.device)
    peaks = torch.zeros(heads, ROWS, device=weight.device)
    saved = (q, k, v, tiles, padded, peaks)
    attention = SimpleNamespace(
        scale=shape.scale,
        strides=(q.stride(0), k.stride(0), v.stride(0)),
        shape=(heads, heads // keys, size, attention_kernels.TILE),
    )
    norms = (block.q_norm, block.k_norm)
    calls: list[Call] = [
        lambda: attention_kernels.TiledAttention.apply(q, k, v, tiles, shape.scale, block.out.padding),
        lambda: attention_kernels.gradient_q(attention, saved, padded, peaks),
        lambda: attention_kernels.gradient_kv(attention, saved, padded, peaks),
        lambda: head_kernels.split_heads(qkv, block.qkv.sizes, *norms, angles, angles, shape),
        lambda: gate_kernels.padded_gate(wide, block.down.padding),
    ]
    if block.down.down is not None:
        d_gated, down = weight.new_zeros(ROWS, block.down.inputs + block.down.padding), block.down.down
        inner = d_gated[:, block.down.inputs :]
        calls.append(lambda: gate_kernels.gate_backward(wide, d_gated[:, : -len(down)], inner, down))
    kinds = [part.quantized for place in range(4) for part in kinds_of(decoder.blocks, place)]
    calls += [weight.fill for weight in kinds if weight is not None and weight.suits_kernels]
    for padding in {block.qkv.padding, block.up.padding, 0}:
        calls.append(partial(norm_kernels.add_and_rms_norm, x, x, block.norm, padding, shape.eps))
    return calls
