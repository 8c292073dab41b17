"""Triton kernels that split (N, q + k + v) into heads and normalise and rotate queries and keys, forward and
backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from proxima.runtime.engine.layer_functions import DecoderShape


@triton.jit
def _split(  # type: ignore[no-untyped-def]
    qkv, q_weight, k_weight, cos, sin, out, eps, stride, heads: tl.constexpr, both: tl.constexpr, lanes: tl.constexpr,
    half: tl.constexpr, normed: tl.constexpr,
):  # fmt: skip
    """All query and key heads of one token."""
    row = tl.program_id(0).to(tl.int64)
    lane, dims = tl.arange(0, lanes)[:, None], tl.arange(0, half)[None, :]
    real = lane < both
    place = lane * (2 * half) + dims
    a = tl.load(qkv + row * stride + place, mask=real, other=0.0).to(tl.float32)
    b = tl.load(qkv + row * stride + place + half, mask=real, other=0.0).to(tl.float32)
    if normed:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)[:, None]
        a = (
            a
            * scale
            * tl.where(lane < heads, tl.load(q_weight + dims), tl.load(k_weight + dims)).to(tl.float32)
        )
        b = (
            b
            * scale
            * tl.where(lane < heads, tl.load(q_weight + half + dims), tl.load(k_weight + half + dims)).to(
                tl.float32
            )
        )
    c = tl.load(cos + row * 2 * half + dims).to(tl.float32)
    s = tl.load(sin + row * 2 * half + dims).to(tl.float32)
    target = out + row * both * 2 * half + place
    tl.store(target, (a * c - b * s).to(out.dtype.element_ty), mask=real)
    tl.store(target + half, (b * c + a * s).to(out.dtype.element_ty), mask=real)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    qkv, q_weight, k_weight, cos, sin, d_q, d_k, d_v, d_qkv, eps, stride, q_stride, k_stride, v_stride, heads: tl.constexpr,
    both: tl.constexpr, lanes: tl.constexpr, half: tl.constexpr, normed: tl.constexpr, values: tl.constexpr,
    value_lanes: tl.constexpr,
):  # fmt: skip
    """The gradient of one token's row."""
    row = tl.program_id(0).to(tl.int64)
    lane, dims = tl.arange(0, lanes)[:, None], tl.arange(0, half)[None, :]
    real, is_q, is_k = lane < both, lane < heads, (lane >= heads) & (lane < both)
    place = lane * (2 * half) + dims
    from_q, from_k = d_q + row * q_stride + place, d_k + row * k_stride + (lane - heads) * (2 * half) + dims
    d_a = tl.load(from_q, mask=is_q, other=0.0).to(tl.float32) + tl.load(from_k, mask=is_k, other=0.0).to(
        tl.float32
    )
    d_b = tl.load(from_q + half, mask=is_q, other=0.0).to(tl.float32)
    d_b += tl.load(from_k + half, mask=is_k, other=0.0).to(tl.float32)
    c = tl.load(cos + row * 2 * half + dims).to(tl.float32)
    s = tl.load(sin + row * 2 * half + dims).to(tl.float32)
    g_a, g_b = d_a * c + d_b * s, d_b * c - d_a * s
    if normed:
        a = tl.load(qkv + row * stride + place, mask=real, other=0.0).to(tl.float32)
        b = tl.load(qkv + row * stride + place + half, mask=real, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)[:, None]
        a, b = a * scale, b * scale
        g_a = g_a * tl.where(is_q, tl.load(q_weight + dims), tl.load(k_weight + dims)).to(tl.float32)
        g_b = g_b * tl.where(is_q, tl.load(q_weight + half + dims), tl.load(k_weight + half + dims)).to(
            tl.float32
        )
        mean = ((tl.sum(g_a * a, 1) + tl.sum(g_b * b, 1)) / (2 * half))[:, None]
        g_a, g_b = scale * (g_a - a * mean), scale * (g_b - b * mean)
    width: tl.constexpr = both * 2 * half + values
    target = d_qkv + row * width + place
    tl.store(target, g_a.to(d_qkv.dtype.element_ty), mask=real)
    tl.store(target + half, g_b.to(d_qkv.dtype.element_ty), mask=real)
    rest = tl.arange(0, value_lanes)
    found = tl.load(d_v + row * v_stride + rest, mask=rest < values, other=0.0)
    tl.store(d_qkv + row * width + both * 2 * half + rest, found, mask=rest < values)


def split_heads(
    qkv: Tensor,
    sizes: tuple[int, ...],
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    shape: DecoderShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `layer_functions.split_heads`; norms are not trained."""
    return _SplitHeads.apply(qkv, q_norm, k_norm, cos, sin, shape)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        shape: DecoderShape,
    ) -> tuple[Tensor, Tensor, Tensor]:
        both, size, rows = shape.heads + shape.kv_heads, shape.head_size, len(qkv)
        out = qkv.new_empty(rows, both, size)
        ctx.shape = (shape.heads, both, triton.next_power_of_2(both), size // 2, q_norm is not None)
        weights = (q_norm, k_norm) if q_norm is not None else (cos, cos)  # not read without a norm
        _split[(rows,)](qkv, *weights, cos, sin, out, shape.eps, qkv.stride(0), *ctx.shape, num_warps=4)
        ctx.save_for_backward(qkv, *weights, cos, sin)
        ctx.eps = shape.eps
        return out[:, : shape.heads], out[:, shape.heads :], qkv[:, both * size :].unflatten(1, (-1, size))

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> Any:
        qkv, *given = ctx.saved_tensors
        d_qkv = torch.empty_like(qkv)
        strides = (qkv.stride(0), d_q.stride(0), d_k.stride(0), d_v.stride(0))
        values = d_v.shape[1] * d_v.shape[2]
        _join[(len(qkv),)](
            qkv, *given, d_q, d_k, d_v, d_qkv, ctx.eps, *strides, *ctx.shape, values,
            triton.next_power_of_2(values), num_warps=4,
        )  # fmt: skip
        return d_qkv, None, None, None, None, None


def fits(shape: DecoderShape) -> bool:
    """Whether the kernels support these shapes."""
    size = shape.head_size
    return size & (size - 1) == 0 and size >= 16 and (shape.heads + shape.kv_heads) * size <= 16384
