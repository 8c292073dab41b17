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
    q4, k4, v4 = pad_rows(layout, q, k, v)
    out = scaled_dot_product_attention(q4, *same_heads(q4, k4, v4), is_causal=True, scale=scale)
    return unpad_rows(layout, out)


def pad_rows(layout: Layout, *packed: Tensor) -> list[Tensor]:
    """(N, H, D) each -> (B, H, T, D) with zeros after the end of a sequence."""
    rows, longest = len(layout.lengths), layout.longest
    if layout.total < rows * longest:
        place = layout.rows * longest + layout.positions
        packed = tuple(x.new_zeros(rows * longest, *x.shape[1:]).index_copy(0, place, x) for x in packed)
    return [x.view(rows, longest, *x.shape[1:]).transpose(1, 2) for x in packed]


def unpad_rows(layout: Layout, padded: Tensor) -> Tensor:
    """(B, H, T, D) -> (N, H, D)."""
    rows, longest = len(layout.lengths), layout.longest
    flat = padded.transpose(1, 2).reshape(rows * longest, padded.shape[1], -1)
    return flat if layout.total == rows * longest else flat[layout.rows * longest + layout.positions]


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
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    starts: Tensor,
    scale: float,
    beyond: Tensor | None = None,
) -> Tensor:
    """One query per sequence against its cache.

    Args:
        q: (B, H, D).
        keys, values: (B, S, Hkv, D), of which the first `lengths` tokens of each sequence are valid.
        lengths: (B,) int32.
        starts: (2, B + 1) int32, the first query and the first key of each sequence.
        beyond: what `beyond_ends` gives for these lengths; where many layers need it, it is known.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return torch.ops.aten._flash_attention_forward(
            q, keys.flatten(0, 1), values.flatten(0, 1), starts[0], starts[1], 1, keys.shape[1], 0.0, False,
            False, scale=scale, seqused_k=lengths,
        )[0]  # fmt: skip
    if beyond is None:
        beyond = beyond_ends(lengths, keys.shape[1] if q.is_cuda else None)
    beyond = beyond.to(q.dtype)
    size, kv_heads = beyond.shape[-1], keys.shape[2]
    parts = []
    # plain products, one for each key head: torch's attention takes twice as long on a CPU for so few queries
    for head, queries in enumerate((q * scale).chunk(kv_heads, 1)):  # those that share a key head adjoin
        scores = torch.baddbmm(beyond, queries, keys[:, :size, head].transpose(1, 2))  # (B, H / Hkv, S)
        parts.append(torch.bmm(scores.softmax(-1), values[:, :size, head]))
    return parts[0] if kv_heads == 1 else torch.cat(parts, 1)


def beyond_ends(lengths: Tensor, size: int | None = None) -> Tensor:
    """(B, 1, S) to be added to scores: -inf after the end of each sequence, up to the end of the longest, or
    up to `size` where a captured graph needs a shape that does not depend on the lengths."""
    size = int(lengths.max()) if size is None else size
    outside = torch.arange(size, device=lengths.device) >= lengths.unsqueeze(1)
    return torch.zeros(outside.shape, device=lengths.device).masked_fill_(outside, -torch.inf).unsqueeze(1)


def same_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for each of the queries that share them."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
