"""The policy's objectives: one function per objective, found by its name.

    ppo    PPO-clip
    cispo  clipped importance weights on the log-probability: every token keeps a gradient
    dis    double-sided masking by the ratio to the policy that sampled

In: what moved. Out: per-token losses, and where a token's gradient was stopped or capped. A new objective is
a function like `ppo`, and its name in `OBJECTIVES`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from proxima.training.cispo import cispo
from proxima.training.dis import dis
from proxima.training.moved import Moved
from proxima.training.policy_loss import clipped, policy_loss
from proxima.training.policy_ratio import policy_ratio


def ppo(moved: Moved, low: float, high: float, dual: float) -> tuple[Tensor, Tensor]:
    ratio = policy_ratio(moved.new, moved.old)
    loss = policy_loss(ratio, moved.advantages, low, dual, high)
    stopped = clipped(ratio.detach(), moved.advantages, low, high)
    if dual > 0:
        stopped |= (moved.advantages < 0) & (ratio.detach() > dual)
    return loss, stopped


OBJECTIVES: dict[str, Callable[[Moved, float, float, float], tuple[Tensor, Tensor]]] = {
    "ppo": ppo,
    "cispo": cispo,
    "dis": dis,
}


def policy_objective(
    name: str, moved: Moved, low: float, high: float, dual: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Per-token losses, and where the gradient was stopped or capped (bool), both in the shape of `moved`.

    Args:
        low: the band of the ratio begins at 1 - low.
        high: it ends at 1 + high; 0: at 1 + low.
        dual: bound of dual clipping, for `ppo`; 0 = off.
    """
    return OBJECTIVES[name](moved, low, high or low, dual)
