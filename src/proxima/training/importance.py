"""Truncated importance weights: w_t = min(pi_training(a_t) / pi_engine(a_t), cap), for tokens that another
engine sampled.

The PPO loss of a token is multiplied by w_t; its ratio stays that of the training side, 1 before the first
optimiser step.
Source: Espeholt et al. 2018 (V-trace's rho-bar), Yao et al. 2025 (rollout engines that round differently).
"""

from __future__ import annotations

import math

from torch import Tensor

from proxima.core.ops import at_least_float32


def importance_weights(logprobs: Tensor, sampled_logprobs: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Weights (B, R), and where they were cut."""
    difference = at_least_float32(logprobs) - at_least_float32(sampled_logprobs)
    return difference.clamp(max=math.log(cap)).exp(), difference > math.log(cap)
