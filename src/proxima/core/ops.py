"""Shared tensor formulas: means under a mask, whitening, entropy, exact KL.

In: tensors. Out: tensors, float32 or wider.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision is widened; float32 and float64 stay as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def masked_mean(x: Tensor, mask: Tensor, total: Tensor | float | None = None) -> Tensor:
    """sum(x over mask) / total.

    `total` is the number of real tokens of the whole minibatch: summed over micro-batches the results then
    equal the minibatch's own mean, which a mean of micro-batch means does not. Without it, `mask.sum()`.
    """
    x = at_least_float32(x)
    count = mask.sum().clamp(min=1) if total is None else total
    return torch.where(mask, x, x.new_zeros(())).sum() / count


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the real tokens, biased variance; 0 off the mask."""
    x = at_least_float32(x)
    centred = x - masked_mean(x, mask)
    scaled = centred * torch.rsqrt(masked_mean(centred**2, mask) + WHITEN_EPS)
    return torch.where(mask, scaled, x.new_zeros(()))


def entropy(logits: Tensor) -> Tensor:
    """-sum p log p over the last dimension; entries of -inf have no share."""
    logprobs = torch.log_softmax(at_least_float32(logits), -1)
    possible = logprobs > -torch.inf
    return -(logprobs.exp() * torch.where(possible, logprobs, logprobs.new_zeros(()))).sum(-1)


def exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(policy || reference) over the whole vocabulary (last dimension): never negative, 0 for equal
    logits."""
    logprobs = torch.log_softmax(at_least_float32(logits), -1)
    ref_logprobs = torch.log_softmax(at_least_float32(ref_logits), -1)
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


def explained_variance(predictions: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(targets - predictions) / Var(targets) over the real tokens; 1 is perfect, 0 as good as a
    constant."""

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    return 1 - variance(targets - predictions) / variance(targets).clamp(min=WHITEN_EPS)


def place_rewards(rewards: Any, mask: Tensor, like: Tensor) -> Tensor:
    """Rewards as (B, R): a sequence's one number on its last real token, or a row of numbers, one a token.

    Args:
        rewards: B numbers or B rows; rows of a tensor or array may be padded to R.
        like: gives the type and the device.
    """
    placed = torch.zeros_like(like)
    if len(rewards) != len(mask):
        raise ValueError(f"{len(rewards)} rewards for {len(mask)} sequences; give one a sequence")
    padded = hasattr(rewards, "__array__")
    for i, (row, length) in enumerate(zip(rewards, mask.sum(1).tolist(), strict=True)):
        numbers = torch.as_tensor(row, dtype=like.dtype, device=like.device)
        if numbers.dim() and padded:
            numbers = numbers[:length]
        if numbers.dim() and len(numbers) != length:
            raise ValueError(f"sequence {i} has {length} tokens but {len(numbers)} rewards; give one a token")
        if not torch.isfinite(numbers).all():
            raise ValueError(
                f"reward {i} is not finite ({row}); leave the sequence out instead of training on it"
            )
        if not length:
            raise ValueError(f"sequence {i} has no tokens to reward")
        placed[i, (slice(length) if numbers.dim() else length - 1)] = numbers
    return placed
