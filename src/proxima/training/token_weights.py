"""How much a token counts in the policy loss of a minibatch: one rule per name.

token     every token alike: sum / tokens
sequence  every response alike: mean over responses of the mean over their tokens (GRPO)
horizon   sum / (responses * horizon), the horizon the longest response allowed (Dr. GRPO)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from proxima.core.ops import at_least_float32


class TokenWeights(NamedTuple):
    """loss = sum(rows[i] * loss[i, t]) / total, over any cut into micro-batches."""

    total: Tensor
    rows: Tensor | None = None  # (B,), of each response; None where all are 1

    def mean(self, losses: Tensor, weights: Tensor | None) -> Tensor:
        """Of the losses of a micro-batch, packed (M,).

        Args:
            weights: `rows` of each token (M,).
        """
        losses = at_least_float32(losses)
        return (losses if weights is None else losses * weights).sum() / self.total


def by_token(sizes: Tensor, horizon: int) -> TokenWeights:
    return TokenWeights(sizes.sum())


def by_sequence(sizes: Tensor, horizon: int) -> TokenWeights:
    return TokenWeights(torch.tensor(len(sizes), device=sizes.device), 1 / sizes.clamp(min=1))


def by_horizon(sizes: Tensor, horizon: int) -> TokenWeights:
    return TokenWeights(torch.tensor(len(sizes) * horizon, device=sizes.device))


WEIGHTINGS: dict[str, Callable[[Tensor, int], TokenWeights]] = {
    "token": by_token,
    "sequence": by_sequence,
    "horizon": by_horizon,
}


def token_weights(mode: str, sizes: Tensor, horizon: int) -> TokenWeights:
    """
    Args:
        sizes: (B,) real tokens of every response of the minibatch, on all processes.
    """
    return WEIGHTINGS[mode](sizes, horizon)
