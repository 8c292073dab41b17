"""Attention with a sliding window or a soft cap, in plain torch: over packed sequences, and one decode step.

The kernels know neither, so these are slower. With a soft cap, and in training on a GPU, all scores are in
memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from proxima.runtime.engine.layout import Layout
from proxima.runtime.engine.packed_attention import pad_rows, same_heads, unpad_rows


class AttentionRule(NamedTuple):
    """What a layer's attention does besides causal attention to all tokens."""

    window: int | None = None
    """Tokens that a token attends to, itself included; None = all before it."""
    cap: float | None = None
    """Soft cap c of scores: c * tanh(score / c)."""

    def changes(self, tokens: int) -> bool:
        """Whether attention among this many tokens differs from the usual one."""
        return self.cap is not None or (self.window is not None and self.window < tokens)


def ruled_packed_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, rule: AttentionRule
) -> Tensor:
    """`packed_attention` under a rule: (N, H, D), (N, Hkv, D) twice -> (N, H, D)."""
    q4, k4, v4 = pad_rows(layout, q, k, v)  # (B, H, T, D)
    place = torch.arange(layout.longest, device=q.device)
    distance = place.unsqueeze(1) - place
    seen = distance >= 0
    if rule.window is not None:
        seen &= distance < rule.window
    return unpad_rows(layout, _attend(q4, *same_heads(q4, k4, v4), seen, scale, rule.cap))


def ruled_cached_attention(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float, rule: AttentionRule
) -> Tensor:
    """`cached_attention` under a rule: (B, H, D) against caches (B, S, Hkv, D) of these lengths (B,)."""
    rows, size = keys.shape[:2]
    ends = lengths.unsqueeze(1)
    place = torch.arange(size, device=q.device)
    seen = place < ends
    if rule.window is not None:
        seen &= place >= ends - rule.window
    k4, v4 = keys.transpose(1, 2), values.transpose(1, 2)
    grouped = q.view(rows, k4.shape[1], -1, q.shape[-1])  # queries that share a key head
    return _attend(grouped, k4, v4, seen[:, None, None], scale, rule.cap).reshape(q.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, cap: float | None) -> Tensor:
    """(B, H, T, D), (B, H, S, D) twice -> (B, H, T, D), of the keys that are seen."""
    trains_on_gpu = q.is_cuda and torch.is_grad_enabled()  # the library's backward pass may add in any order
    if cap is None and not trains_on_gpu:
        return scaled_dot_product_attention(q, k, v, seen, scale=scale)
    return explicit_attention(q, k, v, seen, scale, cap)


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, cap: float | None
) -> Tensor:
    """The same with all scores in memory."""
    scores = q @ k.transpose(2, 3) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1, dtype=torch.float32).to(q.dtype) @ v
