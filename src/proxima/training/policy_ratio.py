"""Policy ratio: r_t = exp(logprob_new_t - logprob_old_t), exactly 1 before the first optimiser step of a
rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from proxima.core.ops import at_least_float32


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """(B, R) -> (B, R)."""
    return torch.exp(at_least_float32(logprobs) - at_least_float32(old_logprobs))


def approximate_kl(ratio: Tensor) -> Tensor:
    """per-token KL(old || new) by Schulman's k3 estimator, (r - 1) - log r: unbiased and never negative."""
    return (ratio - 1) - torch.log(ratio.clamp(min=1e-30))
