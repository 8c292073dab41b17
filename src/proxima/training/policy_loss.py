"""PPO-clip (Schulman et al. 2017): loss_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t).

`high` is `low` where it is not given; above it, unlikely tokens have more room to rise (Yu et al. 2025,
clip-higher). With dual clip (Ye et al. 2020), where A_t < 0 the objective is bounded below by c A_t, c > 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    ratio: Tensor,
    advantages: Tensor,
    clip_epsilon: float,
    dual_clip: float = 0.0,
    clip_epsilon_high: float | None = None,
) -> Tensor:
    """Per-token loss, (B, R) -> (B, R); `dual_clip` 0 is off."""
    high = clip_epsilon if clip_epsilon_high is None else clip_epsilon_high
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_epsilon, 1 + high) * advantages)
    if dual_clip > 0:
        bounded = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return -objective


def clipped(
    ratio: Tensor, advantages: Tensor, clip_epsilon: float, clip_epsilon_high: float | None = None
) -> Tensor:
    """Where clipping has stopped the gradient: outside the band on the side the advantage pushes to.

    Bool (B, R).
    """
    high = clip_epsilon if clip_epsilon_high is None else clip_epsilon_high
    return ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - clip_epsilon))
