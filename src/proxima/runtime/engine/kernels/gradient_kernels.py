"""A Triton kernel for an adapter's two gradients: tall, narrow products that are added to float32 sinks.

A program computes some columns over all rows, in order, so that a repeated run gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS, ROWS = 64, 64  # per program, and read at once
MOST_PADDING = 64


@triton.jit
def _narrow(narrow, narrow_stride, wide, wide_stride, first, width, rows, padding, lanes: tl.constexpr, columns_: tl.constexpr, rows_: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """narrow.T @ wide (lanes, columns), of the columns from `first` on."""
    lane, columns, steps = tl.arange(0, lanes), first + tl.arange(0, columns_), tl.arange(0, rows_)
    found = tl.zeros([lanes, columns_], tl.float32)
    for start in range(0, rows, rows_):
        line = (start + steps).to(tl.int64)[:, None]
        left = tl.load(
            narrow + line * narrow_stride + lane[None, :],
            mask=(line < rows) & (lane[None, :] < padding),
            other=0.0,
        )
        right = tl.load(
            wide + line * wide_stride + columns[None, :],
            mask=(line < rows) & (columns[None, :] < width),
            other=0.0,
        )
        found = tl.dot(tl.trans(left), right, found)
    return found


@triton.jit
def _add_gradients(  # type: ignore[no-untyped-def]
    d_inner, d_inner_stride, x, x_stride, d_down, inputs, inner, inner_stride, dy, dy_stride, d_up, outputs, rows, padding,
    lanes: tl.constexpr, columns_: tl.constexpr, rows_: tl.constexpr,
):  # fmt: skip
    lane, of_down = tl.arange(0, lanes), tl.cdiv(inputs, columns_)
    if tl.program_id(0) < of_down:
        first = tl.program_id(0) * columns_
        found = _narrow(
            d_inner, d_inner_stride, x, x_stride, first, inputs, rows, padding, lanes, columns_, rows_
        )
        column = first + tl.arange(0, columns_)[None, :]
        inside = (lane[:, None] < padding) & (column < inputs)
        sink = d_down + lane[:, None] * inputs + column
        tl.store(sink, tl.load(sink, mask=inside, other=0.0) + found, mask=inside)
    else:
        start = (tl.program_id(0) - of_down) * columns_
        sums = _narrow(
            inner, inner_stride, dy, dy_stride, start, outputs, rows, padding, lanes, columns_, rows_
        )
        line = start + tl.arange(0, columns_)[:, None]
        here = (lane[None, :] < padding) & (line < outputs)
        target = d_up + line * padding + lane[None, :]
        tl.store(target, tl.load(target, mask=here, other=0.0) + tl.trans(sums), mask=here)


def add_gradients(sinks: tuple[Tensor, ...], d_inner: Tensor, x: Tensor, dy: Tensor, inner: Tensor) -> None:
    """sinks[0] (padding, in) += d_inner.T @ x, and sinks[1] (out, padding) += dy.T @ inner, in one launch.

    Args:
        d_inner, inner: (N, padding), at most `MOST_PADDING` columns.
        x, dy: (N, in) and (N, out). Rows of all four may lie apart.
    """
    d_down, d_up = sinks
    padding, inputs = d_down.shape
    outputs, rows = len(d_up), len(dy)
    grid = (triton.cdiv(inputs, COLUMNS) + triton.cdiv(outputs, COLUMNS),)
    _add_gradients[grid](
        d_inner, d_inner.stride(0), x, x.stride(0), d_down, inputs, inner, inner.stride(0), dy, dy.stride(0), d_up,
        outputs, rows, padding, max(16, triton.next_power_of_2(padding)), COLUMNS, ROWS, num_warps=4, num_stages=4,
    )  # fmt: skip
