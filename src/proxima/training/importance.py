"""Truncated importance weights: w_t = min(pi_training(a_t) / pi_engine(a_t), cap), for tokens that another
engine or an older policy sampled.

The PPO loss of a token is multiplied by w_t; its ratio stays that of the training side, 1 before the first
optimiser step.
Source: Espeholt et al. 2018 (V-trace's rho-bar), Yao et al. 2025 (rollout engines that round differently).
"""

from __future__ import annotations

import math

from torch import Tensor

from proxima.core.ops import at_least_float32, masked_mean
from proxima.core.pairs import TokenPairs
from proxima.runs import sampling_gap

NEGLIGIBLE_GAP = 1e-3  # mean per-token |log-probability of engine - of training side| that needs no weights


def importance_weights(logprobs: Tensor, sampled_logprobs: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Weights (B, R), and where they were cut."""
    difference = at_least_float32(logprobs) - at_least_float32(sampled_logprobs)
    return difference.clamp(max=math.log(cap)).exp(), difference > math.log(cap)


def add_importance_weights(pairs: TokenPairs, cap: float, is_old: bool) -> tuple[TokenPairs, float]:
    """Pairs with `importance`, and the share of weights that `cap` cut; unchanged where the engine's
    log-probabilities are unknown or differ by no more than rounding may.

    Args:
        is_old: an older policy sampled, so that no difference is negligible.
    """
    sampled = pairs.tokens.sampled_logprobs
    if sampled is None or (not is_old and float(sampling_gap(pairs)) <= NEGLIGIBLE_GAP):
        return pairs, 0.0
    weights, cut = importance_weights(pairs.column("logprob_policy"), sampled, cap)
    return pairs.with_columns(importance=weights), float(masked_mean(cut.float(), pairs.mask))
