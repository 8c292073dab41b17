"""Causal attention over packed sequences, and one decode step of it against a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from proxima.runtime.engine.layout import Layout


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, padding: int = 0
) -> Tensor:
    """Each sequence attends to itself, causally: (N, H, D), (N, Hkv, D) twice -> (N, H, D); or, where the
    kernels run, (N, H * D + padding) with the last ones unset."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        if (tiled := _tiled(q.shape[-1])) is not None:
            return tiled(q, k, v, layout.tiles, scale, padding)
        return _Flash.apply(q, k, v, layout.starts, layout.longest, scale)
    rows, longest = len(layout.lengths), layout.longest
    if layout.total == rows * longest:  # nothing to pad
        padded = [x.view(rows, longest, *x.shape[1:]) for x in (q, k, v)]
    else:
        place = layout.rows * longest + layout.positions
        padded = [x.new_zeros(rows * longest, *x.shape[1:]).index_copy(0, place, x) for x in (q, k, v)]
        padded = [x.view(rows, longest, *x.shape[1:]) for x in padded]
    q4, k4, v4 = (x.transpose(1, 2) for x in padded)
    out = scaled_dot_product_attention(q4, *_same_heads(q4, k4, v4), is_causal=True, scale=scale).transpose(
        1, 2
    )
    out = out.reshape(rows * longest, *q.shape[1:])
    return out if layout.total == rows * longest else out[place]


@cache
def _tiled(size: int) -> Callable[..., Tensor] | None:
    """The Triton kernels where Triton is installed and they support the head size."""
    try:
        from proxima.runtime.engine.kernels import TiledAttention
    except ImportError:
        return None
    return TiledAttention.apply if size in (16, 32, 64, 128) else None


class _Flash(torch.autograd.Function):
    """Flash attention with a deterministic backward pass, so that runs are bit-exactly repeatable."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
    ) -> Tensor:
        out, logsumexp, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, logsumexp, starts, state, unused)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, out, logsumexp, starts, state, unused = ctx.saved_tensors
        given = (gradients[0], q, k, v, out, logsumexp, starts, starts, ctx.longest, ctx.longest)
        with _deterministic():
            found = torch.ops.aten._flash_attention_backward(
                *given, 0.0, True, state, unused, scale=ctx.scale
            )
        return *found, None, None, None


@contextmanager
def _deterministic() -> Iterator[None]:
    settings: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


def cached_attention(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, starts: Tensor, scale: float
) -> Tensor:
    """One query per sequence against its cache.

    Args:
        q: (B, H, D).
        keys, values: (B, S, Hkv, D), of which the first `lengths` tokens of each sequence are valid.
        lengths: (B,) int32.
        starts: (2, B + 1) int32, the first query and the first key of each sequence.
    """
    rows, size = keys.shape[:2]
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return torch.ops.aten._flash_attention_forward(
            q, keys.flatten(0, 1), values.flatten(0, 1), starts[0], starts[1], 1, size, 0.0, False, False,
            scale=scale, seqused_k=lengths,
        )[0]  # fmt: skip
    seen = torch.arange(size, device=q.device) < lengths.unsqueeze(1)  # (B, S)
    k4, v4 = keys.transpose(1, 2), values.transpose(1, 2)
    groups = q.shape[1] // k4.shape[1]  # queries that share a key head are adjacent: no keys are repeated
    grouped = q.view(rows, k4.shape[1], groups, -1)
    return scaled_dot_product_attention(grouped, k4, v4, seen[:, None, None], scale=scale).reshape(q.shape)


def _same_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
