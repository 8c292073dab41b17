"""Importance weights of tokens that another engine or an older policy sampled: one correction per name, of
w_t = pi_training(a_t) / pi_engine(a_t).

    truncate       min(w_t, high)
    mask           w_t within low .. high, 0 outside
    sequence_mask  1 in a sequence whose geometric mean of w_t lies within low .. high, 0 in others

The loss of a token is multiplied by its weight; rejected tokens still count in the loss's denominator. The
PPO ratio stays that of the training side, 1 before the first optimiser step.
Source: Espeholt et al. 2018 (V-trace's rho-bar), Yao et al. 2025 (rollout engines that round differently),
IcePop 2025 (mask), Step-3.5-Flash 2026 (sequence mask).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from proxima.core.ops import at_least_float32, masked_mean
from proxima.core.pairs import TokenPairs
from proxima.runs import sampling_gap

NEGLIGIBLE_GAP = 1e-3  # mean per-token |log-probability of engine - of training side| that needs no weights


def importance_weights(logprobs: Tensor, sampled_logprobs: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Weights (B, R), and where they were cut."""
    difference = at_least_float32(logprobs) - at_least_float32(sampled_logprobs)
    return difference.clamp(max=math.log(cap)).exp(), difference > math.log(cap)


def truncate(old: Tensor, sampled: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return importance_weights(old, sampled, high)


def mask_tokens(old: Tensor, sampled: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    difference = at_least_float32(old) - at_least_float32(sampled)
    outside = _outside(difference, low, high)
    return difference.masked_fill(outside, -torch.inf).exp(), outside


def mask_sequences(
    old: Tensor, sampled: Tensor, mask: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    difference = at_least_float32(old) - at_least_float32(sampled)
    means = torch.where(mask, difference, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    outside = _outside(means, low, high).unsqueeze(1).expand_as(difference)
    return (~outside).to(difference.dtype), outside


def _outside(difference: Tensor, low: float, high: float) -> Tensor:
    return (difference < math.log(low)) | (difference > math.log(high))


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]] = {
    "truncate": truncate,
    "mask": mask_tokens,
    "sequence_mask": mask_sequences,
}


def correction(
    mode: str, old: Tensor, sampled: Tensor, mask: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Weights (B, R), and where they were cut or set to 0.

    Args:
        old: log-probabilities (B, R) on the training side, before the update.
        sampled: those that the tokens were drawn with.
    """
    return CORRECTIONS[mode](old, sampled, mask, low, high)


def add_importance_weights(
    pairs: TokenPairs, mode: str, low: float, high: float, is_old: bool
) -> tuple[TokenPairs, float]:
    """Pairs with `importance`, and the share of weights that were cut or set to 0; unchanged where the
    engine's log-probabilities are unknown or differ by no more than rounding may.

    Args:
        is_old: an older policy sampled, so that no difference is negligible.
    """
    sampled = pairs.tokens.sampled_logprobs
    if sampled is None or (not is_old and float(sampling_gap(pairs)) <= NEGLIGIBLE_GAP):
        return pairs, 0.0
    weights, cut = correction(mode, pairs.column("logprob_policy"), sampled, pairs.mask, low, high)
    return pairs.with_columns(importance=weights), float(masked_mean(cut.float(), pairs.mask))
