"""KL to the reference as a per-token loss, from sampled tokens: one estimator per name.

    k2  (log pi - log pi_ref)^2 / 2
    k3  r_t (pi_ref / pi - 1 - log(pi_ref / pi)), r_t = pi / pi_old with its gradient

The slope of k2 in log pi is log(pi / pi_ref), that of k3 r_t times it: in expectation the gradient of the
true KL of a state, of k2 while the policy is the one that sampled, of k3 during the whole update. Without the
ratio k3 has another gradient, and k1 as a loss none. In the reward only k1 is right: the gradient of k3 there
may point away from the reference (Tang et al. 2025, 2506.09477; Liu et al. 2025, 2510.01555).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from proxima.core.ops import at_least_float32


def k2(new: Tensor, reference: Tensor, ratio: Tensor) -> Tensor:
    return (new - reference) ** 2 / 2


def k3(new: Tensor, reference: Tensor, ratio: Tensor) -> Tensor:
    difference = reference - new
    return ratio * (difference.exp() - 1 - difference)


KL_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"k2": k2, "k3": k3}


def kl_loss(name: str, new: Tensor, reference: Tensor, ratio: Tensor) -> Tensor:
    """Per-token losses in the shape of all three.

    Args:
        new: log-probabilities of the policy as it is now; the gradient flows through them.
        ratio: of the policy now to the one before the update, with its gradient.
    """
    return KL_LOSSES[name](at_least_float32(new), at_least_float32(reference), ratio)
