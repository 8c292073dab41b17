"""CISPO (MiniMax 2025): loss_t = -sg(min(r_t, 1 + high)) A_t log pi(a_t), sg without a gradient.

The weight is capped, and the token still learns; there is no lower bound. The loss's own size means little:
only its slope is that of a policy gradient.
"""

from __future__ import annotations

from torch import Tensor

from proxima.core.ops import at_least_float32
from proxima.training.moved import Moved
from proxima.training.policy_ratio import policy_ratio


def cispo(moved: Moved, low: float, high: float, dual: float) -> tuple[Tensor, Tensor]:
    ratio = policy_ratio(moved.new, moved.old).detach()
    return -ratio.clamp(max=1 + high) * moved.advantages * at_least_float32(moved.new), ratio > 1 + high
