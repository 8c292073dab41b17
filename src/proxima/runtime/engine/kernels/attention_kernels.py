"""Triton kernels: causal attention over packed sequences, forward and backward.

A program computes one tile: up to `TILE` tokens of one sequence, one head. Tiles start where sequences start,
so a token's result does not depend on what its sequence is batched with. Sums have a fixed order, so results
are bit-exactly repeatable. Query heads that share a key head are summed inside a program: no keys are
repeated, and nothing is reduced afterwards.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxima.runtime.engine.layout import TILE

LOG2_E = tl.constexpr(math.log2(math.e))


class TileConfig(NamedTuple):
    """How a kernel iterates over the keys (or queries) of its tile: block size, warps, pipeline stages."""

    block: int
    warps: int
    stages: int


# the fastest of those tried on an H200
FORWARD = TileConfig(32, 4, 3)
BACKWARD_Q = TileConfig(64, 4, 2)
BACKWARD_KV = TileConfig(32, 4, 2)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, tiles, out, peaks, scale, total, q_stride, k_stride, v_stride, out_stride, heads: tl.constexpr,
    group: tl.constexpr, size: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A tile of queries against the keys up to its end."""
    head, entry = tl.program_id(0), tiles + tl.program_id(1) * 3
    first, start, end = (
        tl.load(entry).to(tl.int64),
        tl.load(entry + 1).to(tl.int64),
        tl.load(entry + 2).to(tl.int64),
    )
    if first >= end:
        return
    rows, steps, dims = first + tl.arange(0, tile), tl.arange(0, block), tl.arange(0, size)
    real = rows[:, None] < end
    queries = tl.load(q + rows[:, None] * q_stride + head * size + dims[None, :], mask=real, other=0.0)
    keys, values = k + (head // group) * size + dims[None, :], v + (head // group) * size + dims[None, :]
    factor = scale * LOG2_E
    peak = tl.full([tile], float("-inf"), tl.float32)
    weight = tl.zeros([tile], tl.float32)
    gathered = tl.zeros([tile, size], tl.float32)
    for at in range(start, first, block):  # whole blocks before the tile
        columns = at + steps
        scores = tl.dot(queries, tl.trans(tl.load(keys + columns[:, None] * k_stride))) * factor
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(peak - higher)
        read = tl.load(values + columns[:, None] * v_stride)
        gathered = tl.dot(shares.to(read.dtype), read, gathered * shrink[:, None])
        weight, peak = weight * shrink + tl.sum(shares, 1), higher
    for at in range(first, tl.minimum(first + tile, end), block):  # the tile itself
        columns = at + steps
        there = columns[:, None] < end
        scores = (
            tl.dot(queries, tl.trans(tl.load(keys + columns[:, None] * k_stride, mask=there, other=0.0)))
            * factor
        )
        scores = tl.where(columns[None, :] <= rows[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(peak - higher)
        read = tl.load(values + columns[:, None] * v_stride, mask=there, other=0.0)
        gathered = tl.dot(shares.to(read.dtype), read, gathered * shrink[:, None])
        weight, peak = weight * shrink + tl.sum(shares, 1), higher
    place = rows[:, None] * out_stride + head * size + dims[None, :]
    tl.store(out + place, (gathered / weight[:, None]).to(out.dtype.element_ty), mask=real)
    tl.store(peaks + head * total + rows, peak + tl.log2(weight), mask=rows < end)


@triton.jit
def _backward_q(  # type: ignore[no-untyped-def]
    q, k, v, out, d_out, tiles, peaks, dots, d_q, scale, total, q_stride, k_stride, v_stride, out_stride, d_out_stride,
    heads: tl.constexpr, group: tl.constexpr, size: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries; stores the dot products of output and its gradient in `dots`."""
    head, entry = tl.program_id(0), tiles + tl.program_id(1) * 3
    first, start, end = (
        tl.load(entry).to(tl.int64),
        tl.load(entry + 1).to(tl.int64),
        tl.load(entry + 2).to(tl.int64),
    )
    if first >= end:
        return
    rows, steps, dims = first + tl.arange(0, tile), tl.arange(0, block), tl.arange(0, size)
    real = rows[:, None] < end
    place = (rows[:, None] * heads + head) * size + dims[None, :]
    queries = tl.load(q + rows[:, None] * q_stride + head * size + dims[None, :], mask=real, other=0.0)
    column = head * size + dims[None, :]
    given = tl.load(d_out + rows[:, None] * d_out_stride + column, mask=real, other=0.0)
    attended = tl.load(out + rows[:, None] * out_stride + column, mask=real, other=0.0)
    dot = tl.sum(given.to(tl.float32) * attended.to(tl.float32), 1)
    tl.store(dots + head * total + rows, dot, mask=rows < end)
    peak = tl.load(peaks + head * total + rows, mask=rows < end, other=0.0)
    keys, values = k + (head // group) * size + dims[None, :], v + (head // group) * size + dims[None, :]
    factor = scale * LOG2_E
    found = tl.zeros([tile, size], tl.float32)
    for at in range(start, first, block):
        columns = at + steps
        key = tl.load(keys + columns[:, None] * k_stride)
        shares = tl.exp2(tl.dot(queries, tl.trans(key)) * factor - peak[:, None])
        d_shares = tl.dot(given, tl.trans(tl.load(values + columns[:, None] * v_stride)))
        found = tl.dot((shares * (d_shares - dot[:, None])).to(key.dtype), key, found)
    for at in range(first, tl.minimum(first + tile, end), block):
        columns = at + steps
        there = columns[:, None] < end
        key = tl.load(keys + columns[:, None] * k_stride, mask=there, other=0.0)
        shares = tl.exp2(tl.dot(queries, tl.trans(key)) * factor - peak[:, None])
        shares = tl.where(columns[None, :] <= rows[:, None], shares, 0.0)
        d_shares = tl.dot(
            given, tl.trans(tl.load(values + columns[:, None] * v_stride, mask=there, other=0.0))
        )
        found = tl.dot((shares * (d_shares - dot[:, None])).to(key.dtype), key, found)
    tl.store(d_q + place, (found * scale).to(d_q.dtype.element_ty), mask=real)


@triton.jit
def _backward_kv(  # type: ignore[no-untyped-def]
    q, k, v, d_out, tiles, peaks, dots, d_k, d_v, scale, total, q_stride, k_stride, v_stride, d_out_stride,
    heads: tl.constexpr, group: tl.constexpr, size: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, from all queries that attend to it."""
    kv_head, entry = tl.program_id(0), tiles + (tl.num_programs(1) - 1 - tl.program_id(1)) * 3
    first, end = tl.load(entry).to(tl.int64), tl.load(entry + 2).to(tl.int64)
    if first >= end:
        return
    rows, steps, dims = first + tl.arange(0, tile), tl.arange(0, block), tl.arange(0, size)
    real = rows[:, None] < end
    key = tl.load(k + rows[:, None] * k_stride + kv_head * size + dims[None, :], mask=real, other=0.0)
    value = tl.load(v + rows[:, None] * v_stride + kv_head * size + dims[None, :], mask=real, other=0.0)
    factor = scale * LOG2_E
    found_k, found_v = tl.zeros([tile, size], tl.float32), tl.zeros([tile, size], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        for at in range(first, tl.minimum(first + tile, end), block):
            columns = at + steps
            there = columns < end
            query = tl.load(
                q + columns[:, None] * q_stride + head * size + dims[None, :], mask=there[:, None], other=0.0
            )
            peak = tl.load(peaks + head * total + columns, mask=there, other=0.0)
            shares = tl.exp2(tl.dot(key, tl.trans(query)) * factor - peak[None, :])
            shares = tl.where(rows[:, None] <= columns[None, :], shares, 0.0)
            place = columns[:, None] * d_out_stride + head * size + dims[None, :]
            given = tl.load(d_out + place, mask=there[:, None], other=0.0)
            found_v = tl.dot(shares.to(given.dtype), given, found_v)
            dot = tl.load(dots + head * total + columns, mask=there, other=0.0)
            d_shares = shares * (tl.dot(value, tl.trans(given)) - dot[None, :])
            found_k = tl.dot(d_shares.to(query.dtype), query, found_k)
        for at in range(first + tile, end, block):
            columns = at + steps
            there = columns < end
            query = tl.load(
                q + columns[:, None] * q_stride + head * size + dims[None, :], mask=there[:, None], other=0.0
            )
            peak = tl.load(peaks + head * total + columns, mask=there, other=0.0)
            shares = tl.exp2(tl.dot(key, tl.trans(query)) * factor - peak[None, :])
            place = columns[:, None] * d_out_stride + head * size + dims[None, :]
            given = tl.load(d_out + place, mask=there[:, None], other=0.0)
            found_v = tl.dot(shares.to(given.dtype), given, found_v)
            dot = tl.load(dots + head * total + columns, mask=there, other=0.0)
            d_shares = shares * (tl.dot(value, tl.trans(given)) - dot[None, :])
            found_k = tl.dot(d_shares.to(query.dtype), query, found_k)
    kv_heads = heads // group
    place = (rows[:, None] * kv_heads + kv_head) * size + dims[None, :]
    tl.store(d_k + place, (found_k * scale).to(d_k.dtype.element_ty), mask=real)
    tl.store(d_v + place, found_v.to(d_v.dtype.element_ty), mask=real)


class TiledAttention(torch.autograd.Function):
    """(N, H, D), (N, Hkv, D) twice, tiles (T, 3) int32 -> (N, H * D + padding); the padding is left unset.

    Tokens in no tile get no output and no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scale: float, padding: int = 0
    ) -> Tensor:
        (total, heads, size), group = q.shape, q.shape[1] // k.shape[1]
        out = q.new_empty(total, heads * size + padding)
        peaks = q.new_empty(heads, total, dtype=torch.float32)
        ctx.scale, ctx.strides = scale, (q.stride(0), k.stride(0), v.stride(0))
        ctx.shape = (heads, group, size, TILE)
        _attend[(heads, len(tiles))](
            q, k, v, tiles, out, peaks, scale, total, *ctx.strides, out.stride(0), *ctx.shape, FORWARD.block,
            num_warps=FORWARD.warps, num_stages=FORWARD.stages,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, tiles, out, peaks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        d_out = gradients[0] if gradients[0].stride(1) == 1 else gradients[0].contiguous()
        saved = ctx.saved_tensors  # once: gradient checkpointing makes them anew for one reading
        dots = torch.empty_like(saved[-1])
        return gradient_q(ctx, saved, d_out, dots), *gradient_kv(ctx, saved, d_out, dots), None, None, None


def gradient_q(ctx: Any, saved: tuple[Tensor, ...], d_out: Tensor, dots: Tensor) -> Tensor:
    """The gradient of the queries; also fills `dots`."""
    q, k, v, tiles, out, peaks = saved
    d_q = q.new_empty(q.shape)
    _backward_q[(ctx.shape[0], len(tiles))](
        q, k, v, out, d_out, tiles, peaks, dots, d_q, ctx.scale, len(q), *ctx.strides, out.stride(0), d_out.stride(0),
        *ctx.shape, BACKWARD_Q.block, num_warps=BACKWARD_Q.warps, num_stages=BACKWARD_Q.stages,
    )  # fmt: skip
    return d_q


def gradient_kv(ctx: Any, saved: tuple[Tensor, ...], d_out: Tensor, dots: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values, after `gradient_q`."""
    q, k, v, tiles, _, peaks = saved
    d_k, d_v = k.new_empty(k.shape), v.new_empty(v.shape)
    _backward_kv[(k.shape[1], len(tiles))](
        q, k, v, d_out, tiles, peaks, dots, d_k, d_v, ctx.scale, len(q), *ctx.strides, d_out.stride(0), *ctx.shape,
        BACKWARD_KV.block, num_warps=BACKWARD_KV.warps, num_stages=BACKWARD_KV.stages,
    )  # fmt: skip
    return d_k, d_v
