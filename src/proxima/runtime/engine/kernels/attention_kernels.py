"""Triton kernels: causal attention over packed sequences, forward and backward.

A program computes one tile: up to `TILE` tokens of one sequence, of one head or of two that share keys. Tiles
start where sequences start, so a token's result does not depend on what its sequence is batched with. Sums have
a fixed order, so results are bit-exactly repeatable. Query heads that share a key head are summed inside a
program: no keys are repeated, and nothing is reduced afterwards. A program adds 64-bit numbers to its pointers
once per block; within a block, offsets have 32 bits.
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
    """How a kernel iterates over the keys (or queries) of its tile.

    Args:
        block: keys (or queries) per step.
        warps: for each head of a program.
        stages: of the pipeline that loads blocks.
        heads: query heads per program, 1 or 2: two that share keys, where the number of those is even.
    """

    block: int
    warps: int
    stages: int
    heads: int = 1

    def options(self, members: int = 1) -> dict[str, int | None]:
        """Of a launch whose programs have this many heads: at most 128 registers where these are two, so that a
        multiprocessor holds two programs."""
        registers = 128 if members == 2 else None
        return {"num_warps": self.warps * members, "num_stages": self.stages, "maxnreg": registers}


class Configs(NamedTuple):
    """Of the three kernels."""

    forward: TileConfig
    backward_q: TileConfig
    backward_kv: TileConfig


# the fastest of those tried on an H200, without its tensor memory accelerator
HOPPER = Configs(TileConfig(64, 4, 2, 2), TileConfig(32, 4, 3, 2), TileConfig(32, 4, 4))
# what fits 99 KiB of shared memory
OTHERS = Configs(TileConfig(32, 4, 3), TileConfig(64, 4, 2), TileConfig(32, 4, 2))


def configs() -> Configs:
    """For the current GPU."""
    if triton.knobs.runtime.interpret:
        return HOPPER
    return HOPPER if triton.runtime.driver.active.get_current_target().arch == 90 else OTHERS


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, tiles, out, peaks, scale, total, q_stride, k_stride, v_stride, out_stride, heads: tl.constexpr,
    group: tl.constexpr, size: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, members: tl.constexpr,
):  # fmt: skip
    """A tile of queries, of `members` heads, against the keys up to its end."""
    head, entry = tl.program_id(0) * members, tiles + tl.program_id(1) * 3
    first, start, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if first >= end:
        return
    lines, steps = tl.arange(0, members * tile), tl.arange(0, block)
    dims = tl.arange(0, size)[None, :]
    rows, member = lines % tile, lines // tile
    real, before, length = rows < end - first, first - start, end - start
    at_first, at_start, kv_column = first.to(tl.int64), start.to(tl.int64), head // group * size
    q += at_first * q_stride + head * size
    place = (rows * q_stride + member * size)[:, None] + dims
    queries = tl.load(q + place, mask=real[:, None], other=0.0)
    k += at_start * k_stride + kv_column
    v += at_start * v_stride + kv_column
    factor = scale * LOG2_E
    peak = tl.full([members * tile], float("-inf"), tl.float32)
    weight = tl.zeros([members * tile], tl.float32)
    gathered = tl.zeros([members * tile, size], tl.float32)
    for at in range(0, tl.minimum(before + tile, length), block):
        there, ahead = steps[:, None] < length - at, tl.cast(at, tl.int64)
        key = tl.load(k + ahead * k_stride + (steps[:, None] * k_stride + dims), mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(key))
        if at + block > before:  # the tile itself
            seen = (at - before + steps)[None, :] <= rows[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1) * factor)
        shares, shrink = tl.exp2(scores * factor - higher[:, None]), tl.exp2(peak - higher)
        read = tl.load(v + ahead * v_stride + (steps[:, None] * v_stride + dims), mask=there, other=0.0)
        gathered = tl.dot(shares.to(read.dtype), read, gathered * shrink[:, None])
        weight, peak = weight * shrink + tl.sum(shares, 1), higher
    out += at_first * out_stride + head * size
    place = (rows * out_stride + member * size)[:, None] + dims
    tl.store(out + place, (gathered / weight[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    tl.store(peaks + (head + member) * total + first + rows, peak + tl.log2(weight), mask=real)


@triton.jit
def _backward_q(  # type: ignore[no-untyped-def]
    q, k, v, out, d_out, tiles, peaks, dots, d_q, scale, total, q_stride, k_stride, v_stride, out_stride, d_out_stride,
    heads: tl.constexpr, group: tl.constexpr, size: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    members: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries, of `members` heads; stores the dot products of output and its gradient in
    `dots`."""
    head, entry = tl.program_id(0) * members, tiles + tl.program_id(1) * 3
    first, start, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if first >= end:
        return
    lines, steps = tl.arange(0, members * tile), tl.arange(0, block)[:, None]
    dims = tl.arange(0, size)[None, :]
    rows, member = lines % tile, lines // tile
    real, before, length = rows < end - first, first - start, end - start
    at_first, at_start, kv_column = first.to(tl.int64), start.to(tl.int64), head // group * size
    token, column, width = rows[:, None], member[:, None] * size + dims, heads * size
    q += at_first * q_stride + head * size
    queries = tl.load(q + token * q_stride + column, mask=real[:, None], other=0.0)
    d_out += at_first * d_out_stride + head * size
    given = tl.load(d_out + token * d_out_stride + column, mask=real[:, None], other=0.0)
    out += at_first * out_stride + head * size
    attended = tl.load(out + token * out_stride + column, mask=real[:, None], other=0.0)
    dot = tl.sum(given.to(tl.float32) * attended.to(tl.float32), 1)
    line = (head + member) * total + first + rows
    tl.store(dots + line, dot, mask=real)
    peak = tl.load(peaks + line, mask=real, other=0.0)
    k += at_start * k_stride + kv_column
    v += at_start * v_stride + kv_column
    factor = scale * LOG2_E
    found = tl.zeros([members * tile, size], tl.float32)
    for at in range(0, tl.minimum(before + tile, length), block):
        there, ahead = steps < length - at, tl.cast(at, tl.int64)
        key = tl.load(k + ahead * k_stride + (steps * k_stride + dims), mask=there, other=0.0)
        value = tl.load(v + ahead * v_stride + (steps * v_stride + dims), mask=there, other=0.0)
        shares = tl.exp2(tl.dot(queries, tl.trans(key)) * factor - peak[:, None])
        if at + block > before:  # the tile itself
            seen = at - before + tl.arange(0, block)[None, :] <= token
            shares = tl.where(seen, shares, 0.0)
        d_shares = tl.dot(given, tl.trans(value))
        found = tl.dot((shares * (d_shares - dot[:, None])).to(key.dtype), key, found)
    d_q += at_first * width + head * size
    tl.store(d_q + token * width + column, (found * scale).to(d_q.dtype.element_ty), mask=real[:, None])


@triton.jit
def _backward_kv(  # type: ignore[no-untyped-def]
    q, k, v, d_out, tiles, peaks, dots, d_k, d_v, scale, total, q_stride, k_stride, v_stride, d_out_stride,
    heads: tl.constexpr, group: tl.constexpr, size: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, from all queries that attend to it."""
    kv_head, entry = tl.program_id(0), tiles + (tl.num_programs(1) - 1 - tl.program_id(1)) * 3
    first, end = tl.load(entry), tl.load(entry + 2)
    if first >= end:
        return
    rows, steps, dims = tl.arange(0, tile)[:, None], tl.arange(0, block), tl.arange(0, size)[None, :]
    at_first, length, head = first.to(tl.int64), end - first, kv_head * group
    real = rows < length
    k += at_first * k_stride + kv_head * size
    v += at_first * v_stride + kv_head * size
    key = tl.load(k + rows * k_stride + dims, mask=real, other=0.0)
    value = tl.load(v + rows * v_stride + dims, mask=real, other=0.0)
    q += at_first * q_stride + head * size
    d_out += at_first * d_out_stride + head * size
    q_part, d_out_part = steps[:, None] * q_stride + dims, steps[:, None] * d_out_stride + dims
    peaks += head * total + first
    dots += head * total + first
    factor = scale * LOG2_E
    found_k, found_v = tl.zeros([tile, size], tl.float32), tl.zeros([tile, size], tl.float32)
    for step in range(tl.cdiv(length, block) * group):
        at, member = step // group * block, step % group
        there, ahead = steps < length - at, tl.cast(at, tl.int64)
        place = q + ahead * q_stride + member * size
        query = tl.load(place + q_part, mask=there[:, None], other=0.0)
        place = d_out + ahead * d_out_stride + member * size
        given = tl.load(place + d_out_part, mask=there[:, None], other=0.0)
        peak = tl.load(peaks + member * total + at + steps, mask=there, other=0.0)
        dot = tl.load(dots + member * total + at + steps, mask=there, other=0.0)
        shares = tl.exp2(tl.dot(key, tl.trans(query)) * factor - peak[None, :])
        if at < tile:  # the tile itself
            shares = tl.where(rows <= at + steps[None, :], shares, 0.0)
        found_v = tl.dot(shares.to(given.dtype), given, found_v)
        d_shares = shares * (tl.dot(value, tl.trans(given)) - dot[None, :])
        found_k = tl.dot(d_shares.to(query.dtype), query, found_k)
    width = heads // group * size
    d_k += at_first * width + kv_head * size
    d_v += at_first * width + kv_head * size
    tl.store(d_k + rows * width + dims, (found_k * scale).to(d_k.dtype.element_ty), mask=real)
    tl.store(d_v + rows * width + dims, found_v.to(d_v.dtype.element_ty), mask=real)


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
        config = configs().forward
        members = shared_heads(config, group)
        _attend[(heads // members, len(tiles))](
            q, k, v, tiles, out, peaks, scale, total, *ctx.strides, out.stride(0), *ctx.shape, config.block,
            members, **config.options(members),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, tiles, out, peaks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        d_out = gradients[0] if gradients[0].stride(1) == 1 else gradients[0].contiguous()
        saved = ctx.saved_tensors  # once: gradient checkpointing makes them anew for one reading
        dots = torch.empty_like(saved[-1])
        return gradient_q(ctx, saved, d_out, dots), *gradient_kv(ctx, saved, d_out, dots), None, None, None


def shared_heads(config: TileConfig, group: int) -> int:
    """How many of the `group` query heads of a key head a program computes."""
    return math.gcd(config.heads, group)


def gradient_q(ctx: Any, saved: tuple[Tensor, ...], d_out: Tensor, dots: Tensor) -> Tensor:
    """The gradient of the queries; also fills `dots`."""
    q, k, v, tiles, out, peaks = saved
    d_q = q.new_empty(q.shape)
    config, (heads, group, *_) = configs().backward_q, ctx.shape
    members = shared_heads(config, group)
    _backward_q[(heads // members, len(tiles))](
        q, k, v, out, d_out, tiles, peaks, dots, d_q, ctx.scale, len(q), *ctx.strides, out.stride(0), d_out.stride(0),
        *ctx.shape, config.block, members, **config.options(members),
    )  # fmt: skip
    return d_q


def gradient_kv(ctx: Any, saved: tuple[Tensor, ...], d_out: Tensor, dots: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values, after `gradient_q`."""
    q, k, v, tiles, _, peaks = saved
    d_k, d_v = k.new_empty(k.shape), v.new_empty(v.shape)
    config = configs().backward_kv
    _backward_kv[(k.shape[1], len(tiles))](
        q, k, v, d_out, tiles, peaks, dots, d_k, d_v, ctx.scale, len(q), *ctx.strides, d_out.stride(0), *ctx.shape,
        config.block, **config.options(),
    )  # fmt: skip
    return d_k, d_v
