"""`Moved`: what an objective of the policy reads, one number per token in each."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Moved(NamedTuple):
    """All of one shape."""

    new: Tensor  # log-probabilities of the policy as it is now; the gradient flows through them
    old: Tensor  # those before the update, on the training side
    advantages: Tensor
    sampled: Tensor | None = None  # those that the tokens were drawn with; None where only `old` are known
