"""Triton kernels of a gated MLP: silu(gate) * up of (N, gate + up), forward and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 16, 128  # of the gradient per program


@triton.jit
def _gate(wide, out, size: tl.constexpr, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * block + tl.arange(0, block)
    real = lanes < size
    opening = tl.load(wide + row * 2 * size + lanes, mask=real, other=0.0).to(tl.float32)
    up = tl.load(wide + row * 2 * size + size + lanes, mask=real, other=0.0)
    opened = (opening * tl.sigmoid(opening)).to(up.dtype)
    tl.store(out + row * width + lanes, opened * up, mask=real)


def gate(wide: Tensor, sizes: tuple[int, ...] = (), activation: str = "") -> Tensor:
    """Like `layer_functions.activate` for gated MLPs."""
    return padded_gate(wide, 0)


def padded_gate(wide: Tensor, padding: int) -> Tensor:
    """The same as (N, gate + padding); the padding is left unset, since the product writes it."""
    rows, size = wide.shape[0], wide.shape[1] // 2
    out = wide.new_empty(rows, size + padding)
    _gate[(rows, triton.cdiv(size, 1024))](wide, out, size, size + padding, 1024, num_warps=4)
    return out


@triton.jit
def _gate_backward(  # type: ignore[no-untyped-def]
    wide, d_out, d_inner, down, d_wide, out, total, padding, stride, inner_stride, size: tl.constexpr, lanes: tl.constexpr, rows_: tl.constexpr,
    columns_: tl.constexpr,
):  # fmt: skip
    columns, rows = (
        tl.program_id(0) * columns_ + tl.arange(0, columns_),
        tl.program_id(1) * rows_ + tl.arange(0, rows_),
    )
    rows = rows.to(tl.int64)
    lane = tl.arange(0, lanes)
    here = (rows[:, None] < total) & (columns[None, :] < size)
    inner = tl.load(
        d_inner + rows[:, None] * inner_stride + lane[None, :],
        mask=(rows[:, None] < total) & (lane[None, :] < padding),
        other=0.0,
    )
    matrix = tl.load(
        down + lane[:, None] * size + columns[None, :],
        mask=(lane[:, None] < padding) & (columns[None, :] < size),
        other=0.0,
    )
    place = rows[:, None] * 2 * size + columns[None, :]
    opening = tl.load(wide + place, mask=here, other=0.0).to(tl.float32)
    up = tl.load(wide + place + size, mask=here, other=0.0).to(tl.float32)
    narrow = rows[:, None] * size + columns[None, :]
    given = tl.load(d_out + rows[:, None] * stride + columns[None, :], mask=here, other=0.0).to(tl.float32)
    gradient = given + tl.dot(inner, matrix)
    share = tl.sigmoid(opening)
    opened = opening * share
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(out + narrow, (opened.to(kind).to(tl.float32) * up).to(kind), mask=here)
    tl.store(d_wide + place, (gradient * up * share * (1 + opening * (1 - share))).to(kind), mask=here)
    tl.store(d_wide + place + size, (gradient * opened).to(kind), mask=here)


def gate_backward(wide: Tensor, d_out: Tensor, d_inner: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The output of `gate`, and the gradient of its input; the output's gradient is d_out + d_inner @ down."""
    (rows, size), padding = d_out.shape, len(down)
    out, d_wide = wide.new_empty(rows, size), torch.empty_like(wide)
    grid = (triton.cdiv(size, COLUMNS), triton.cdiv(rows, ROWS))
    lanes = max(16, triton.next_power_of_2(padding))
    _gate_backward[grid](
        wide, d_out, d_inner, down, d_wide, out, rows, padding, d_out.stride(0), d_inner.stride(0), size, lanes,
        ROWS, COLUMNS, num_warps=4,
    )  # fmt: skip
    return out, d_wide
