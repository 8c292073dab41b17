"""DIS, double-sided importance sampling as in SAO (2026): loss_t = -sg(r_t 1[1 - low < r_t < 1 + high]) A_t
log pi(a_t).

r_t is the ratio to the policy that sampled, whatever engine it ran on: it is its own importance weight, so
that no other may stand beside it. Tokens outside the band have no gradient.
"""

from __future__ import annotations

from torch import Tensor

from proxima.core.ops import at_least_float32
from proxima.training.moved import Moved
from proxima.training.policy_ratio import policy_ratio


def dis(moved: Moved, low: float, high: float, dual: float) -> tuple[Tensor, Tensor]:
    ratio = policy_ratio(moved.new, moved.old if moved.sampled is None else moved.sampled).detach()
    outside = (ratio <= 1 - low) | (ratio >= 1 + high)
    weight = ratio.masked_fill(outside, 0.0)
    return -weight * moved.advantages * at_least_float32(moved.new), outside
