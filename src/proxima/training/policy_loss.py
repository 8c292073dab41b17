"""PPO-clip (Schulman et al. 2017): loss_t = -min(r_t A_t, clip(r_t, 1 - eps, 1 + eps) A_t).

With dual clip (Ye et al. 2020), where A_t < 0 the objective is bounded below by c A_t, c > 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(ratio: Tensor, advantages: Tensor, clip_epsilon: float, dual_clip: float = 0.0) -> Tensor:
    """Per-token loss, (B, R) -> (B, R); `dual_clip` 0 is off."""
    objective = torch.minimum(
        ratio * advantages, ratio.clamp(1 - clip_epsilon, 1 + clip_epsilon) * advantages
    )
    if dual_clip > 0:
        bounded = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return -objective


def clipped(ratio: Tensor, advantages: Tensor, clip_epsilon: float) -> Tensor:
    """Where clipping has stopped the gradient: outside the band on the side the advantage pushes to.

    Bool (B, R).
    """
    return ((advantages > 0) & (ratio > 1 + clip_epsilon)) | ((advantages < 0) & (ratio < 1 - clip_epsilon))
