"""Triton kernels of a decode step, for few rows: norm, products with an adapter folded in, attention against
the cache.

Blocks of outputs and inputs depend on the weights alone, never on the number of rows, and every output is summed in a fixed
order. So a sequence's numbers are the same bits in any slot and with any number of slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxima.runtime.engine.kernels.nf4_kernels import Parts

FEW_ROWS, MANY_ROWS = 16, 64  # per program of a product
SHARED = 90 * 1024  # bytes that a product's stages may take; GPUs have 99 KiB and more
MOST_SUMS = 64  # programs of a row times parts that each of them adds up
LOG2_E = tl.constexpr(1.4426950408889634)


class CacheTiling(NamedTuple):
    """How attention against the cache is cut into programs."""

    block: int  # cached tokens that a program reads at once
    piece: int  # cached tokens per program; pieces are combined in ascending order
    warps: int
    stages: int


CACHE = CacheTiling(32, 1024, 2, 4)


@triton.jit
def _rotated(lines, real, weight, cos, sin, eps, head: tl.constexpr, normed: tl.constexpr):  # type: ignore[no-untyped-def]
    """Heads (L, head) that start at `lines`, normalised and rotated, in float32."""
    dims = tl.arange(0, head)[None, :]
    across = (dims + head // 2) % head  # the other half of a rotated pair
    x = tl.load(lines + dims, mask=real, other=0.0).to(tl.float32)
    other = tl.load(lines + across, mask=real, other=0.0).to(tl.float32)
    if normed:
        by = tl.rsqrt(tl.sum(x * x, 1) / head + eps)[:, None]
        x = x * by * tl.load(weight + dims).to(tl.float32)
        other = other * by * tl.load(weight + across).to(tl.float32)
    turn = tl.where(dims < head // 2, -1.0, 1.0)
    return x * tl.load(cos + dims).to(tl.float32) + other * turn * tl.load(sin + dims).to(tl.float32)


@triton.jit
def _combined(parts, peaks, totals, first, pieces, real, head: tl.constexpr):  # type: ignore[no-untyped-def]
    """The attention of all pieces (16, head), added in ascending order. Four are read at a time."""
    lanes, dims = tl.arange(0, 16), tl.arange(0, head)
    top = tl.full([16], float("-inf"), tl.float32)
    for index in range(0, pieces):
        peak = tl.load(peaks + (first + index) * 16 + lanes, cache_modifier=".cg")
        top = tl.maximum(top, peak)
    total = tl.zeros([16], tl.float32)
    gathered = tl.zeros([16, head], tl.float32)
    for four in range(0, pieces, 4):
        for more in tl.static_range(4):
            here = four + more < pieces
            place = (first + four + more) * 16 + lanes
            grow = tl.exp2(tl.load(peaks + place, mask=here, other=float("-inf"), cache_modifier=".cg") - top)
            at, inside = parts + place[:, None] * head + dims[None, :], real & here
            gathered += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg") * grow[:, None]
            total += tl.load(totals + place, mask=here, other=0.0, cache_modifier=".cg") * grow
    return gathered / total[:, None]


@triton.jit
def _over_cached(  # type: ignore[no-untyped-def]
    q, k_at, v_at, count, scale, cached: tl.constexpr, head: tl.constexpr, block: tl.constexpr
):
    """The running softmax over the first `count` tokens of a piece: its weighted values (16, head), its sum and
    its peak."""
    dims, steps = tl.arange(0, head), tl.arange(0, block)
    tokens = steps[:, None] * cached + dims[None, :]
    peak = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    gathered = tl.zeros([16, head], tl.float32)
    for start in range(0, count, block):
        seen, at = start + steps < count, start * cached + tokens
        k = tl.load(k_at + at, mask=seen[:, None], other=0.0)
        v = tl.load(v_at + at, mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(peak - higher)
        gathered = tl.dot(weights.to(v.dtype), v, gathered * shrink[:, None])
        total, peak = total * shrink + tl.sum(weights, 1), higher
    return gathered, total, peak


@triton.jit
def _with_new(q, k, v, gathered, total, peak, scale):  # type: ignore[no-untyped-def]
    """The running softmax after the new token, whose key and value are (1, head)."""
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
    higher = tl.maximum(peak, score)
    weight, shrink = tl.exp2(score - higher), tl.exp2(peak - higher)
    gathered = gathered * shrink[:, None] + weight[:, None] * v.to(tl.float32)
    return gathered, total * shrink + weight, higher


@triton.jit
def _attend_cache(  # type: ignore[no-untyped-def]
    qkv, q_weight, k_weight, cos, sin, keys, values, lengths, out, parts, peaks, totals, arrived, scale, eps,
    stride: tl.constexpr, size, kv_heads: tl.constexpr, group: tl.constexpr, head: tl.constexpr,
    normed: tl.constexpr, block: tl.constexpr, piece: tl.constexpr,
):  # fmt: skip
    """One sequence, one key head, one piece of the cache: its queries, normalised and rotated, against the
    cached tokens. The piece of the new token also writes its key and value. All heads of a token, which lie
    side by side, are read at about the same time."""
    kv, row, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length, begin = tl.load(lengths + row), part * piece
    if begin > length:
        return
    heads: tl.constexpr = kv_heads * group
    cached: tl.constexpr = kv_heads * head
    kind: tl.constexpr = keys.dtype.element_ty
    lanes, dims = tl.arange(0, 16), tl.arange(0, head)
    real = lanes[:, None] < group  # the matrix unit wants 16 rows
    first = (row * size + begin) * cached + kv * head
    k_at, v_at = keys + first, values + first
    count = tl.minimum(piece, length - begin)
    token, cos, sin = qkv + row * stride, cos + length * head, sin + length * head
    q_at = token + (kv * group + lanes[:, None]) * head
    q = _rotated(q_at, real, q_weight, cos, sin, eps, head, normed).to(kind)
    scale *= LOG2_E
    gathered, total, peak = _over_cached(q, k_at, v_at, count, scale, cached, head, block)
    if count < piece:  # the new token belongs to this piece
        one = tl.arange(0, 1)[:, None]
        line = token + (heads + kv) * head + one
        k_new = _rotated(line, one < 1, k_weight, cos, sin, eps, head, normed).to(kind)
        v_new = tl.load(line + cached + dims[None, :])
        slot = count * cached + one + dims[None, :]
        tl.store(k_at + slot, k_new)
        tl.store(v_at + slot, v_new)
        gathered, total, peak = _with_new(q, k_new, v_new, gathered, total, peak, scale)
    target = out + row * heads * head + (kv * group + lanes[:, None]) * head + dims[None, :]
    pieces = length // piece + 1
    if pieces == 1:
        tl.store(target, (gathered / total[:, None]).to(kind), mask=real)
        return
    mine = (row * kv_heads + kv) * tl.num_programs(2)
    place = (mine + part) * 16 + lanes
    tl.store(parts + place[:, None] * head + dims[None, :], gathered, mask=real)
    tl.store(peaks + place, peak)
    tl.store(totals + place, total)
    tl.debug_barrier()  # every warp has stored before the program counts as arrived
    if tl.atomic_add(arrived + row * kv_heads + kv, 1, sem="acq_rel") == pieces - 1:  # the last one
        tl.store(arrived + row * kv_heads + kv, 0)
        tl.store(target, _combined(parts, peaks, totals, mine, pieces, real, head).to(kind), mask=real)


class CacheAttention:
    """Attention of one new token per sequence over its cache. Keeps what the pieces exchange; all sequences
    and layers of a cache share it."""

    def __init__(self, slots: int, size: int, kv_heads: int, head: int, device: torch.device):
        self.pieces = triton.cdiv(size, CACHE.piece)
        partial = (slots, kv_heads, self.pieces, 16)
        self.parts = torch.empty(*partial, head, device=device)
        self.peaks, self.totals = (torch.empty(partial, device=device) for _ in range(2))
        self.arrived = torch.zeros(slots, kv_heads, dtype=torch.int32, device=device)

    def __call__(
        self, qkv: Tensor, norms: tuple[Tensor | None, Tensor | None], cos: Tensor, sin: Tensor,
        keys: Tensor, values: Tensor, lengths: Tensor, scale: float, eps: float,
    ) -> Tensor:  # fmt: skip
        """(n, H * D) from the product (n, (H + 2 Hkv) * D) and (n, S, Hkv, D) caches, of which each sequence's
        first `lengths` tokens are valid; the new keys and values are written after them.

        Args:
            cos, sin: (S, D), the rotary angles of every position.
        """
        rows, size, kv_heads, head = keys.shape
        heads = qkv.shape[1] // head - 2 * kv_heads
        out = qkv.new_empty(rows, heads * head)
        q_norm, k_norm = norms
        weights = (cos, cos) if q_norm is None else (q_norm, k_norm)  # not read without a norm
        _attend_cache[(kv_heads, rows, self.pieces)](
            qkv, *weights, cos, sin, keys, values, lengths, out, self.parts, self.peaks, self.totals,
            self.arrived, scale, eps, qkv.stride(0), size, kv_heads, heads // kv_heads, head,
            q_norm is not None, CACHE.block, CACHE.piece, num_warps=CACHE.warps, num_stages=CACHE.stages,
        )  # fmt: skip
        return out


@triton.jit(do_not_specialize=["rows"])
def _product(  # type: ignore[no-untyped-def]
    x, weight, bias, down, out, rows, outputs, stride: tl.constexpr, inputs: tl.constexpr, width: tl.constexpr,
    padding: tl.constexpr, lanes: tl.constexpr, gated: tl.constexpr, biased: tl.constexpr,
    splits: tl.constexpr, block_out: tl.constexpr, block_rows: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """x (rows, inputs) times weight (outputs, width), whose first `inputs` columns are read; with padding, the
    adapter's inner values are computed here and multiplied with the columns that follow. Gated: of outputs
    and as many rows of the weight after them, silu(first) * second. Of several parts of the inputs each gives
    float32 sums."""
    outs = tl.program_id(0) * block_out + tl.arange(0, block_out)
    line, part = tl.program_id(1) * block_rows + tl.arange(0, block_rows), tl.program_id(2)
    steps, lane = tl.arange(0, block_k), tl.arange(0, lanes)
    real, here = line < rows, outs < outputs
    found = tl.zeros([block_out, block_rows], tl.float32)
    second = tl.zeros([block_out, block_rows], tl.float32)
    inner = tl.zeros([lanes, block_rows], tl.float32)
    x_at = x + line.to(tl.int64)[:, None] * stride
    w_at = weight + outs.to(tl.int64)[:, None] * width
    share: tl.constexpr = (inputs + splits * block_k - 1) // (splits * block_k) * block_k
    for start in range(part * share, tl.minimum((part + 1) * share, inputs), block_k):
        columns = start + steps
        inside = columns < inputs
        given = tl.trans(tl.load(x_at + columns[None, :], mask=real[:, None] & inside[None, :], other=0.0))
        w = tl.load(w_at + columns[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        found = tl.dot(w, given, found)
        if gated:
            w_up = tl.load(
                w_at + outputs * width + columns[None, :], mask=here[:, None] & inside[None, :], other=0.0
            )
            second = tl.dot(w_up, given, second)
        if padding:
            a = tl.load(
                down + lane[:, None] * inputs + columns[None, :],
                mask=(lane[:, None] < padding) & inside[None, :],
                other=0.0,
            )
            inner = tl.dot(a, given, inner)
    kind: tl.constexpr = x.dtype.element_ty
    if padding:
        b = tl.load(w_at + inputs + lane[None, :], mask=here[:, None] & (lane[None, :] < padding), other=0.0)
        found = tl.dot(b, inner.to(kind), found)
    if splits > 1:
        place = out + (part * rows + line).to(tl.int64)[None, :] * outputs + outs[:, None]
        tl.store(place, found, mask=real[None, :] & here[:, None])
        return
    if biased:
        found += tl.load(bias + outs, mask=here, other=0.0).to(tl.float32)[:, None]
        if gated:
            second += tl.load(bias + outputs + outs, mask=here, other=0.0).to(tl.float32)[:, None]
    result = found.to(kind)
    if gated:
        opening = result.to(tl.float32)
        result = (opening * tl.sigmoid(opening)).to(kind) * second.to(kind)
    target = out + line.to(tl.int64)[None, :] * outputs + outs[:, None]
    tl.store(target, result, mask=real[None, :] & here[:, None])


class Blocks(NamedTuple):
    """How a product is cut into programs."""

    outputs: int  # per program
    inputs: int  # read at once
    stages: int
    splits: int = 1  # parts of the inputs


def blocks(outputs: int, inputs: int, gated: bool) -> Blocks:
    """What was fastest on an H200 (132 multiprocessors), in the shared memory of smaller GPUs. A weight with no
    more outputs than inputs is read by about 128 programs, in parts of at least four blocks of inputs: the norm
    that follows it adds them up. Of other weights parts would take a kernel of their own."""
    if gated or inputs < outputs < 4_096:
        return Blocks(32, 64, 6)
    parts = min(128 // triton.cdiv(outputs, 64), inputs // 256) if outputs <= inputs else 1
    splits = max(1, parts)
    return Blocks(64, 64, min(6, triton.cdiv(inputs, 64 * splits)), splits)


def _stages(made: Blocks, rows: int, lanes: int, gated: bool) -> int:
    """As many stages as fit the shared memory of smaller GPUs: adapters of a high rank take some of it. The sums
    are the same with any number."""
    outputs = made.outputs * (2 if gated else 1)
    held = 2 * made.inputs * (outputs + rows + lanes)  # bytes of a stage; the last one has none of its own
    return min(made.stages, max(2, SHARED // held + 1))


def few_rows_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, down: Tensor | None = None, gated: bool = False
) -> Tensor | Parts:
    """x (n, in) @ weight.T -> (n, out), for few rows; in parts where the weight is better read by more
    programs.

    Args:
        weight: (out, in), or (out, in + padding) with `down`.
        down: (padding, in), an adapter; its inner values x @ down.T are multiplied with the padding.
        gated: the weight has (2 out) rows, and the result is silu of the first half times the second; not
            with `down`.
    """
    rows, inputs = x.shape
    outputs, padding = len(weight) // (2 if gated else 1), 0 if down is None else len(down)
    block_rows = FEW_ROWS if rows <= FEW_ROWS else MANY_ROWS
    made = blocks(outputs, inputs, gated)
    parted = made.splits > 1
    out = (
        x.new_empty(made.splits, rows, outputs, dtype=torch.float32) if parted else x.new_empty(rows, outputs)
    )
    grid = (triton.cdiv(outputs, made.outputs), triton.cdiv(rows, block_rows), made.splits)
    lanes = max(16, triton.next_power_of_2(padding))
    _product[grid](
        x, weight, x if bias is None else bias, x if down is None else down, out, rows, outputs, x.stride(0),
        inputs, weight.stride(0), padding, lanes, gated, bias is not None, made.splits, made.outputs, block_rows,
        made.inputs, num_warps=4, num_stages=_stages(made, block_rows, lanes if padding else 0, gated),
    )  # fmt: skip
    return Parts(out, bias) if parted else out


def few_rows_product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, down: Tensor | None = None, gated: bool = False
) -> Tensor:
    """The same as one tensor."""
    found = few_rows_parts(x, weight, bias, down, gated)
    return found.added(x.dtype) if isinstance(found, Parts) else found


@triton.jit
def _add_norm_down(  # type: ignore[no-untyped-def]
    x, tokens, change, bias, weight, down, sums, out, eps, size: tl.constexpr, padding: tl.constexpr,
    block: tl.constexpr, few: tl.constexpr, looked_up: tl.constexpr, adds: tl.constexpr, parts: tl.constexpr,
    biased: tl.constexpr,
):  # fmt: skip
    """One row, and a few of its inner values; the first program of a row also writes the sum and the norm."""
    row, part, lanes = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, block)
    real = lanes < size
    if padding:
        lines = part * few + tl.arange(0, few)
        matrix = tl.load(down + lines[:, None] * size + lanes[None, :], mask=real[None, :], other=0.0)
    scales = tl.load(weight + lanes, mask=real, other=0.0)
    source = row
    if looked_up:
        source = tl.load(tokens + row)
    total = tl.load(x + source * size + lanes, mask=real, other=0.0)
    if adds:
        added = tl.load(change + row * size + lanes, mask=real, other=0.0)
        for index in tl.static_range(1, parts):
            place = (index * tl.num_programs(0) + row) * size + lanes
            added += tl.load(change + place, mask=real, other=0.0)
        if biased:
            added += tl.load(bias + lanes, mask=real, other=0.0).to(tl.float32)
        total += added.to(total.dtype)
    if adds or looked_up:
        tl.store(sums + row * size + lanes, total, mask=real & (part == 0))
    wide = total.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = scaled.to(out.dtype.element_ty) * scales
    target = out + row * (size + padding)
    tl.store(target + lanes, normed, mask=real & (part == 0))
    if padding:
        inner = tl.sum(matrix.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
        tl.store(target + size + lines, inner.to(out.dtype.element_ty))


def add_norm_down(
    x: Tensor,
    change: Tensor | Parts | None,
    weight: Tensor,
    eps: float,
    down: Tensor | None,
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual stream (n, D) after adding a change; its RMS norm followed by an adapter's inner values,
    (n, D + padding).

    Args:
        change: (n, D), or its parts, whose sum is rounded once before it is added.
        tokens: (n,), rows of x (V, D) that are the residual stream; by default all are.
    """
    size, padding = x.shape[1], 0 if down is None else len(down)
    rows = len(x) if tokens is None else len(tokens)
    block = triton.next_power_of_2(size)
    few = min(8, max(1, 8192 // block))
    if isinstance(change, Parts) and padding // few * len(change.sums) > MOST_SUMS:
        change = change.added(x.dtype)  # quicker than in every program; the bits are the same
    added, bias, parts = (*change, len(change.sums)) if isinstance(change, Parts) else (change, None, 1)
    sums = x if change is None and tokens is None else x.new_empty(rows, size)
    out = x.new_empty(rows, size + padding)
    given = (x if one is None else one for one in (tokens, added, bias))  # None is not read
    _add_norm_down[(rows, max(1, padding // few))](
        x, *given, weight, x if down is None else down, sums, out, eps, size, padding, block, few,
        tokens is not None, change is not None, parts, bias is not None, num_warps=4 if block <= 1024 else 8,
    )  # fmt: skip
    return sums, out
