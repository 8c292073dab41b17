"""Triton kernels: a residual sum and its RMS norm in one pass, and their gradient in another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from proxima.runtime.engine.layer_functions import Norm


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, change, weight, sums, out, eps, size: tl.constexpr, width: tl.constexpr, block: tl.constexpr, adds: tl.constexpr
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    real = lanes < size
    total = tl.load(x + row * size + lanes, mask=real, other=0.0)
    if adds:
        total += tl.load(change + row * size + lanes, mask=real, other=0.0)
        tl.store(sums + row * size + lanes, total, mask=real)
    wide = total.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = scaled.to(out.dtype.element_ty) * tl.load(weight + lanes, mask=real, other=0.0)
    tl.store(out + row * width + lanes, normed, mask=real)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    sums, weight, d_out, d_sums, d_x, eps, stride, size: tl.constexpr, block: tl.constexpr, adds: tl.constexpr
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    real = lanes < size
    x = tl.load(sums + row * size + lanes, mask=real, other=0.0).to(tl.float32)
    given = tl.load(d_out + row * stride + lanes, mask=real, other=0.0).to(tl.float32)
    given = given * tl.load(weight + lanes, mask=real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    x = x * scale
    found = scale * (given - x * (tl.sum(given * x, 0) / size))
    if adds:
        found += tl.load(d_sums + row * size + lanes, mask=real, other=0.0).to(tl.float32)
    tl.store(d_x + row * size + lanes, found.to(d_x.dtype.element_ty), mask=real)


class _AddNorm(torch.autograd.Function):
    """Sums and their norms. Both addends have one gradient; only the sum is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor | None, weight: Tensor, padding: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        (rows, size), adds = x.shape, change is not None
        block = triton.next_power_of_2(size)
        sums = torch.empty_like(x) if adds else x.view_as(x)
        out = x.new_empty(rows, size + padding)
        ctx.shape = (size, block)
        ctx.warps = min(8, max(1, block // 256))
        _forward[(rows,)](
            x, change if adds else x, weight, sums, out, eps, size, size + padding, block, adds, num_warps=ctx.warps
        )  # fmt: skip
        ctx.save_for_backward(sums, weight)
        ctx.eps, ctx.adds = eps, adds
        ctx.set_materialize_grads(False)
        return sums, out

    @staticmethod
    def backward(ctx: Any, d_sums: Tensor | None, d_out: Tensor | None) -> Any:
        sums, weight = ctx.saved_tensors
        if d_out is None:
            return d_sums, d_sums if ctx.adds else None, None, None, None
        d_x = torch.empty_like(sums)
        given = d_out if d_sums is None else d_sums.contiguous()
        _backward[(len(sums),)](
            sums, weight, d_out, given, d_x, ctx.eps, d_out.stride(0), *ctx.shape, d_sums is not None, num_warps=ctx.warps
        )  # fmt: skip
        return d_x, d_x if ctx.adds else None, None, None, None


def add_and_rms_norm(
    x: Tensor, change: Tensor, norm: Norm, padding: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Like `layer_functions.add_and_norm` without a bias, for a frozen norm; the padding is left unset, since
    the product writes it."""
    return _AddNorm.apply(x, change, norm.weight, padding, eps)


def first_rms_norm(x: Tensor, norm: Norm, padding: int, eps: float) -> Tensor:
    """Like `layer_functions.first_norm`."""
    return _AddNorm.apply(x, None, norm.weight, padding, eps)[1]
