"""Shared tensor formulas: means under a mask, whitening, entropy, exact KL.

In: tensors. Out: tensors, float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision is widened; float32 and float64 stay as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def masked_mean(x: Tensor, mask: Tensor | None, total: Tensor | float | None = None) -> Tensor:
    """sum(x over mask) / total: the one way in which losses and metrics are averaged over tokens.

    Args:
        mask: None where every entry is real (packed tokens).
        total: the number of real tokens of the whole minibatch. Summed over micro-batches the results then
            equal the minibatch's own mean, which a mean of micro-batch means does not. Without it, the number
            of real entries.
    """
    x = at_least_float32(x)
    if mask is None:
        return x.sum() / (x.numel() if total is None else total)
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


def exact_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) over the whole vocabulary (last dimension): never negative, 0 where they are
    equal.

    Args:
        logprobs: the policy's log-probabilities, normalised (as `log_softmax` gives them).
        ref_logprobs: the reference's.
    """
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


def explained_variance(predictions: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(targets - predictions) / Var(targets) over the real tokens; 1 is perfect, 0 as good as a
    constant."""

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    return 1 - variance(targets - predictions) / variance(targets).clamp(min=WHITEN_EPS)


def last_real(mask: Tensor) -> Tensor:
    """Bool (B, R), True at each row's last real token, which may follow holes; nowhere in an empty row."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


def turn_ends(mask: Tensor) -> Tensor:
    """Bool (B, R), True at the last real token before each hole, and at each row's last real token."""
    return mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))


def place_rewards(rewards: Sequence[object] | Tensor, mask: Tensor, like: Tensor) -> Tensor:
    """Rewards as (B, R): a sequence's one number on its last real token, or a row of numbers, one per token.

    Waits for the device as often for a batch as for one sequence.

    Args:
        rewards: B numbers or B rows; rows of a tensor or array may be padded to R.
        like: gives the type and the device.
    """
    if len(rewards) != len(mask):
        raise ValueError(f"{len(rewards)} rewards for {len(mask)} sequences; give one per sequence")
    sizes = mask.sum(1).tolist()
    if 0 in sizes:
        raise ValueError(f"sequence {sizes.index(0)} has no tokens to reward")
    if hasattr(rewards, "__array__"):
        placed = _place_table(torch.as_tensor(rewards).to(like), mask.to(like.device), sizes, like)
    else:
        placed = _place_rows(rewards, mask.cpu(), sizes, like).to(like.device)
    finite = placed.isfinite().all(1).tolist()
    if not all(finite):
        row = finite.index(False)
        raise ValueError(
            f"reward {row} is not finite ({rewards[row]}); leave the sequence out instead of training on it"
        )
    return placed


def _place_table(numbers: Tensor, mask: Tensor, sizes: list[int], like: Tensor) -> Tensor:
    """From one tensor, (B,) or (B, R) and padded."""
    if numbers.dim() == 1:
        return torch.where(last_real(mask), numbers.unsqueeze(1), like.new_zeros(()))
    width = numbers.shape[1]
    if width < mask.shape[1] and bool(mask[:, width:].any()):
        row = mask[:, width:].any(1).tolist().index(True)
        raise _misfit(row, sizes[row], width)
    missing = like.shape[1] - width
    fitted = torch.nn.functional.pad(numbers, (0, missing)) if missing > 0 else numbers[:, : like.shape[1]]
    return torch.where(mask, fitted, like.new_zeros(()))


def _place_rows(rewards: Sequence[object], mask: Tensor, sizes: list[int], like: Tensor) -> Tensor:
    """From a list of numbers and rows, on the CPU; a row has one number per real token."""
    placed = torch.zeros(like.shape, dtype=like.dtype)
    ends = last_real(mask)
    for row, (given, size) in enumerate(zip(rewards, sizes, strict=True)):
        numbers = torch.as_tensor(given, dtype=like.dtype, device="cpu")
        if numbers.dim() and len(numbers) != size:
            raise _misfit(row, size, len(numbers))
        placed[row, mask[row] if numbers.dim() else ends[row]] = numbers
    return placed


def _misfit(row: int, tokens: int, rewards: int) -> ValueError:
    return ValueError(f"sequence {row} has {tokens} tokens but {rewards} rewards; give one per token")
