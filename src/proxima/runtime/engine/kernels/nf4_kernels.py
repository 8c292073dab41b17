"""Triton kernels that read a base in NF4: `fill` decodes a projection beside its adapter, for products of many
rows; `nf4_product` decodes and multiplies at once, for few rows.

Both multiply value and absmax in float32 and round once to the run's dtype, so they see the bits that
`core.nf4.dequantize` gives. No product and sum may be fused into one rounding there (`enable_fp_fusion`).
Block sizes depend on the weights alone and every sum has a fixed order, as in `few_rows_kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxima.core.nf4 import VALUES

if TYPE_CHECKING:
    from proxima.runtime.engine.quantized_weights import QuantizedWeight

FILL_ROWS, FILL_BLOCKS = 4, 16  # rows and blocks of 64 weights per program
FEW_ROWS, MANY_ROWS = 16, 64  # rows of the input per program of a product
NF4 = tl.constexpr(VALUES)
SUMS = 1024  # outputs per program that adds up parts of products


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    codes, absmax, nested, offsets, table, values, first, block, real, is_nested: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Weights (R, 64 B) of B blocks in each of R rows, which begin at the blocks `first`."""
    at = first[:, None] + block[None, :]
    scale = tl.load(absmax + at, mask=real, other=0)
    if is_nested:
        group = at >> 8
        scale = tl.load(table + scale.to(tl.int32), mask=real, other=0.0)
        scale = scale * tl.load(nested + group, mask=real, other=0.0)
        scale = scale + tl.load(offsets + group, mask=real, other=0.0)
    lanes = tl.arange(0, 32)
    pairs = tl.load(codes + at[:, :, None] * 32 + lanes[None, None, :], mask=real[:, :, None], other=0)
    pairs = pairs.to(tl.int32)
    flat = tl.reshape(pairs, [first.shape[0] * block.shape[0] * 32])
    known = tl.load(values + tl.arange(0, 16))  # gathered, not loaded by code: looked up in shared memory
    high = tl.reshape(tl.gather(known, flat >> 4, 0), pairs.shape) * scale[:, :, None]
    low = tl.reshape(tl.gather(known, flat & 15, 0), pairs.shape) * scale[:, :, None]
    both = tl.interleave(high.to(kind), low.to(kind))  # the first weight of a byte is in its high half
    return tl.reshape(both, [first.shape[0], block.shape[0] * 64])


@triton.jit
def _pair(first, second, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two float32 rounded to half precision, in one word; the first is in its low half."""
    asm: tl.constexpr = (
        "cvt.rn.bf16x2.f32 $0, $2, $1;" if kind == tl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    )
    return tl.inline_asm_elementwise(asm, "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _bytes(first, second, chosen: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four of the eight bytes of two words: those whose numbers are the digits of `chosen`, lowest first."""
    asm: tl.constexpr = "prmt.b32 $0, $1, $2, " + chosen + ";"
    return tl.inline_asm_elementwise(asm, "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _look_up(codes, l0, l1, l2, l3, h0, h1, h2, h3):  # type: ignore[no-untyped-def]
    """The weights of the low two bytes of `codes`, as two words, by byte permutation: `l` and `h` are the low
    and the high bytes of the block's 16 weights. `tests/gpu/test_byte_lookup.py` runs it without a GPU."""
    asm: tl.constexpr = """{
        .reg .b32 s, m, a, b, c;
        and.b32 s, $2, 0x7777;
        and.b32 m, $2, 0x8888;
        shr.u32 m, m, 1;
        or.b32 m, m, 0x3210;
        prmt.b32 a, $3, $4, s;
        prmt.b32 b, $5, $6, s;
        prmt.b32 a, a, b, m;
        prmt.b32 b, $7, $8, s;
        prmt.b32 c, $9, $10, s;
        prmt.b32 b, b, c, m;
        prmt.b32 $0, a, b, 0x4051;
        prmt.b32 $1, a, b, 0x6273;
    }"""
    return tl.inline_asm_elementwise(
        asm, "=r,=r,r,r,r,r,r,r,r,r,r", [codes, l0, l1, l2, l3, h0, h1, h2, h3],
        dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _halves(word, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """(...) words -> (..., 2) numbers of half precision."""
    low, high = word.to(tl.int16).to(kind, bitcast=True), (word >> 16).to(tl.int16).to(kind, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _decode_by_bytes(  # type: ignore[no-untyped-def]
    codes, absmax, nested, offsets, table, first, tile, last, here, is_nested: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """The weights (R, 256) of four blocks in each of R rows, the same bits as `_decode` gives, in the order of
    `_columns_by_bytes`: each thread of a matrix unit then decodes whole blocks for itself. A block's scale is
    multiplied with the 16 values once; codes choose among the 16 rounded weights by byte permutation."""
    block = tile * 4 + tl.arange(0, 4)
    real = here[:, None] & (block[None, :] < last)
    at = first[:, None] + block[None, :]
    scale = tl.load(absmax + at, mask=real, other=0)
    if is_nested:
        group = at >> 8
        scale = tl.load(table + scale.to(tl.int32), mask=real, other=0.0)
        scale = scale * tl.load(nested + group, mask=real, other=0.0)
        scale = scale + tl.load(offsets + group, mask=real, other=0.0)
    places = at[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    words = tl.load(codes.to(tl.pointer_type(tl.int32)) + places, mask=real[:, :, None], other=0)
    wide = tl.broadcast_to(scale[:, :, None], words.shape)
    p0, p1 = _pair(wide * NF4[0], wide * NF4[1], kind), _pair(wide * NF4[2], wide * NF4[3], kind)
    p2, p3 = _pair(wide * NF4[4], wide * NF4[5], kind), _pair(wide * NF4[6], wide * NF4[7], kind)
    p4, p5 = _pair(wide * NF4[8], wide * NF4[9], kind), _pair(wide * NF4[10], wide * NF4[11], kind)
    p6, p7 = _pair(wide * NF4[12], wide * NF4[13], kind), _pair(wide * NF4[14], wide * NF4[15], kind)
    l0, l1 = _bytes(p0, p1, "0x6420"), _bytes(p2, p3, "0x6420")
    l2, l3 = _bytes(p4, p5, "0x6420"), _bytes(p6, p7, "0x6420")
    h0, h1 = _bytes(p0, p1, "0x7531"), _bytes(p2, p3, "0x7531")
    h2, h3 = _bytes(p4, p5, "0x7531"), _bytes(p6, p7, "0x7531")
    o0, o1 = _look_up(words, l0, l1, l2, l3, h0, h1, h2, h3)
    o2, o3 = _look_up(words >> 16, l0, l1, l2, l3, h0, h1, h2, h3)
    four = tl.join(tl.join(o0, o2), tl.join(o1, o3))  # (R, 4, 8, 2, 2): o0, o1, o2, o3
    ordered = tl.permute(_halves(four, kind), (0, 2, 3, 4, 1, 5))
    return tl.reshape(ordered, [first.shape[0], 256])


@triton.jit
def _decode_tile(  # type: ignore[no-untyped-def]
    codes, absmax, nested, offsets, table, values, first, tile, inputs: tl.constexpr, here,
    is_nested: tl.constexpr, kind: tl.constexpr, blocks: tl.constexpr, by_bytes: tl.constexpr,
):  # fmt: skip
    """The weights of a tile of blocks, in the order that belongs to the way of decoding."""
    if by_bytes:
        return _decode_by_bytes(
            codes, absmax, nested, offsets, table, first, tile, inputs // 64, here, is_nested, kind
        )
    else:
        block = tile * blocks + tl.arange(0, blocks)
        inside = here[:, None] & (block[None, :] < inputs // 64)
        return _decode(codes, absmax, nested, offsets, table, values, first, block, inside, is_nested, kind)


@triton.jit
def _columns_by_bytes():  # type: ignore[no-untyped-def]
    """Which of 256 inputs each weight of `_decode_by_bytes` multiplies: of 16 at once, a thread of the matrix
    unit holds two pairs, and they come from its own block."""
    k = tl.arange(0, 256)
    return (k // 2) % 4 * 64 + k // 16 * 4 + (k // 8) % 2 * 2 + k % 2


@triton.jit
def _fill(  # type: ignore[no-untyped-def]
    codes, absmax, nested, offsets, table, values, starts, up, out, rows, inputs: tl.constexpr,
    padding: tl.constexpr, lanes: tl.constexpr, is_nested: tl.constexpr, rows_: tl.constexpr,
    blocks_: tl.constexpr,
):  # fmt: skip
    """A few rows of out (rows, inputs + padding); the programs of the first columns also copy the adapter."""
    kind: tl.constexpr = out.dtype.element_ty
    line = tl.program_id(0) * rows_ + tl.arange(0, rows_)
    block = tl.program_id(1) * blocks_ + tl.arange(0, blocks_)
    columns = tl.program_id(1) * blocks_ * 64 + tl.arange(0, blocks_ * 64)
    here = line < rows
    first = tl.load(starts + line, mask=here, other=0)
    real = here[:, None] & (block[None, :] < inputs // 64)
    weights = _decode(codes, absmax, nested, offsets, table, values, first, block, real, is_nested, kind)
    target = out + line.to(tl.int64)[:, None] * (inputs + padding)
    tl.store(target + columns[None, :], weights, mask=here[:, None] & (columns[None, :] < inputs))
    if padding:
        lane = tl.arange(0, lanes)
        inside = here[:, None] & (lane[None, :] < padding) & (tl.program_id(1) == 0)
        b = tl.load(up + line.to(tl.int64)[:, None] * padding + lane[None, :], mask=inside, other=0.0)
        tl.store(target + inputs + lane[None, :], b, mask=inside)


def fill(weight: QuantizedWeight, out: Tensor) -> None:
    """Write the decoded weight, then the adapter's up projection, to out (rows, in + padding); in one launch."""
    (rows, padding), inputs = weight.up.shape, weight.inputs
    grid = (triton.cdiv(rows, FILL_ROWS), triton.cdiv(inputs // 64, FILL_BLOCKS))
    _fill[grid](
        *weight.tables, weight.starts, weight.up, out, rows, inputs, padding,
        triton.next_power_of_2(max(1, padding)), weight.is_nested, FILL_ROWS, FILL_BLOCKS, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _product(  # type: ignore[no-untyped-def]
    x, inner, codes, absmax, nested, offsets, table, values, starts, up, bias, out, rows, outputs,
    stride: tl.constexpr, inner_stride: tl.constexpr, inputs: tl.constexpr, padding: tl.constexpr,
    lanes: tl.constexpr, is_nested: tl.constexpr, gated: tl.constexpr, biased: tl.constexpr,
    splits: tl.constexpr, block_out: tl.constexpr, block_rows: tl.constexpr, blocks: tl.constexpr,
    by_bytes: tl.constexpr,
):  # fmt: skip
    """A part of the inputs of x (rows, inputs) times the weight; the last part ends with the adapter's inner
    values times its up projection. One part: the result. Several: float32 sums.
    Gated: of outputs and as many rows of the weight after them, silu(first) * second."""
    kind: tl.constexpr = x.dtype.element_ty
    outs = tl.program_id(0) * block_out + tl.arange(0, block_out)
    line, part = tl.program_id(1) * block_rows + tl.arange(0, block_rows), tl.program_id(2)
    steps, lane = tl.arange(0, blocks * 64), tl.arange(0, lanes)
    here, real = outs < outputs, line < rows
    first = tl.load(starts + outs, mask=here, other=0)
    first_up = first
    if gated:
        first_up = tl.load(starts + outputs + outs, mask=here, other=0)
    found = tl.zeros([block_out, block_rows], tl.float32)
    second = tl.zeros([block_out, block_rows], tl.float32)
    x_at = x + line.to(tl.int64)[:, None] * stride
    if by_bytes:
        steps = _columns_by_bytes()
    tiles: tl.constexpr = (inputs + 64 * blocks - 1) // (64 * blocks)
    share: tl.constexpr = (tiles + splits - 1) // splits
    for tile in range(part * share, tl.minimum((part + 1) * share, tiles)):
        columns = tile * blocks * 64 + steps
        given = tl.load(x_at + columns[None, :], mask=real[:, None] & (columns[None, :] < inputs), other=0.0)
        given = tl.trans(given)
        w = _decode_tile(
            codes,
            absmax,
            nested,
            offsets,
            table,
            values,
            first,
            tile,
            inputs,
            here,
            is_nested,
            kind,
            blocks,
            by_bytes,
        )
        found = tl.dot(w, given, found)
        if gated:
            w = _decode_tile(
                codes, absmax, nested, offsets, table, values, first_up, tile, inputs, here, is_nested, kind, blocks,
                by_bytes,
            )  # fmt: skip
            second = tl.dot(w, given, second)
    if padding:  # the adapter is the last tile of the last part
        last = part == splits - 1
        given = tl.load(
            inner + line.to(tl.int64)[:, None] * inner_stride + lane[None, :],
            mask=real[:, None] & (lane[None, :] < padding) & last,
            other=0.0,
        )
        given = tl.trans(given)
        up_at = up + outs.to(tl.int64)[:, None] * padding + lane[None, :]
        inside = here[:, None] & (lane[None, :] < padding)
        found = tl.dot(tl.load(up_at, mask=inside, other=0.0), given, found)
        if gated:
            second = tl.dot(tl.load(up_at + outputs * padding, mask=inside, other=0.0), given, second)
    target = out + (part * rows + line).to(tl.int64)[None, :] * outputs + outs[:, None]
    inside = real[None, :] & here[:, None]
    if splits > 1:
        tl.store(target, found, mask=inside)
    else:
        if biased:
            found += tl.load(bias + outs, mask=here, other=0.0).to(tl.float32)[:, None]
        result = found.to(kind)
        if gated:
            if biased:
                second += tl.load(bias + outputs + outs, mask=here, other=0.0).to(tl.float32)[:, None]
            opening = result.to(tl.float32)
            result = (opening * tl.sigmoid(opening)).to(kind) * second.to(kind)
        tl.store(target, result, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _add_parts(  # type: ignore[no-untyped-def]
    parts, bias, out, count, outputs, splits: tl.constexpr, biased: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """The parts of a product in ascending order, then the bias."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    real = at < count
    total = tl.load(parts + at, mask=real, other=0.0)
    for part in tl.static_range(1, splits):
        total += tl.load(parts + part * count + at, mask=real, other=0.0)
    if biased:
        total += tl.load(bias + at % outputs, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=real)


class Parts(NamedTuple):
    """A product of which each program has read a part of the inputs."""

    sums: Tensor  # (P, n, out) float32
    bias: Tensor | None

    def added(self, kind: torch.dtype) -> Tensor:
        """(n, out): the parts in ascending order, then the bias."""
        sums, bias = self
        out = torch.empty(sums.shape[1:], dtype=kind, device=sums.device)
        _add_parts[(triton.cdiv(out.numel(), SUMS),)](
            sums, out if bias is None else bias, out, out.numel(), out.shape[1], len(sums), bias is not None, SUMS,
            num_warps=4,
        )  # fmt: skip
        return out


@triton.jit
def _down(x, down, out, size: tl.constexpr, padding: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One inner value of one row."""
    row, line, lanes = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, block)
    real = lanes < size
    given = tl.load(x + row * size + lanes, mask=real, other=0.0).to(tl.float32)
    a = tl.load(down + line * size + lanes, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * padding + line, tl.sum(given * a, 0).to(out.dtype.element_ty))


def _inner_values(x: Tensor, down: Tensor) -> Tensor:
    """x (n, in) @ down.T -> (n, padding)."""
    (rows, inputs), padding = x.shape, len(down)
    out = x.new_empty(rows, padding)
    if padding:
        block = triton.next_power_of_2(inputs)
        _down[(rows, padding)](x, down, out, inputs, padding, block, num_warps=4 if block <= 4096 else 8)
    return out


class Tiling(NamedTuple):
    """How a product is cut into programs."""

    outputs: int  # per program
    blocks: int  # of 64 inputs, read at once
    splits: int  # parts of the inputs, so that narrow weights, too, give every multiprocessor work
    warps: int = 4
    stages: int = 3
    by_bytes: bool = False
    """Codes are looked up by byte permutation, with 4 blocks; Triton's interpreter cannot."""


def tiling(outputs: int, inputs: int, gated: bool) -> Tiling:
    """It depends on the weight alone, so a row's bits do not depend on the batch."""
    return Tiling(32, 2, 1 if gated or outputs > 8_192 or inputs < 2_048 else 4)


def nf4_parts(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, down: Tensor | None = None, gated: bool = False
) -> Tensor | Parts:
    """x @ weight.T with the loaded adapter -> (n, out), for few rows; in parts where the weight is better read
    by more programs.

    Args:
        x: (n, in + padding), of which the last are the adapter's inner values; or (n, in) with `down`.
        down: (padding, in); the inner values are x @ down.T.
        gated: the result is silu of the first half of the outputs times the second.
    """
    rows, (outputs, padding), inputs = len(x), weight.up.shape, weight.inputs
    inner = x[:, inputs:] if down is None else _inner_values(x, down)
    outputs = outputs // 2 if gated else outputs
    made = tiling(outputs, inputs, gated)
    parted = made.splits > 1
    out = (
        x.new_empty(made.splits, rows, outputs, dtype=torch.float32) if parted else x.new_empty(rows, outputs)
    )
    block_rows = FEW_ROWS if rows <= FEW_ROWS else MANY_ROWS
    grid = (triton.cdiv(outputs, made.outputs), triton.cdiv(rows, block_rows), made.splits)
    _product[grid](
        x, inner, *weight.tables, weight.starts, weight.up, x if bias is None else bias, out, rows, outputs,
        x.stride(0), inner.stride(0), inputs, padding, max(16, triton.next_power_of_2(padding)), weight.is_nested,
        gated, bias is not None, made.splits, made.outputs, block_rows, made.blocks, made.by_bytes,
        num_warps=made.warps, num_stages=made.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return Parts(out, bias) if parted else out


def nf4_product(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, down: Tensor | None = None, gated: bool = False
) -> Tensor:
    """The same as one tensor."""
    found = nf4_parts(x, weight, bias, down, gated)
    return found.added(x.dtype) if isinstance(found, Parts) else found
