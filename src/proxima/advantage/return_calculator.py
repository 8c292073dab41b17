"""Discounted reward-to-go, the value model's target: G_t = reward_t + gamma * G_{t+1}."""

from __future__ import annotations

import torch
from torch import Tensor

from proxima.core.pairs import PairsLike, SAPairs, as_pairs


def discounted_sum(x: Tensor, mask: Tensor, discount: float | Tensor) -> Tensor:
    """y_t = x_t + discount * y_{t+1} along each row, where t + 1 is the next real token. (B, R) -> (B, R).

    Args:
        discount: one for all rows, one for each (B,), or one for each token (B, R).
    """
    given, real = x.cpu(), mask.cpu().unbind(1)  # small steps: a GPU would take longer
    columns, sums = given.unbind(1), []
    total = given.new_zeros(len(given))
    factors = discount.cpu() if isinstance(discount, Tensor) else discount
    for position in reversed(range(len(columns))):
        factor = factors[:, position] if isinstance(factors, Tensor) and factors.dim() == 2 else factors
        total = torch.where(real[position], columns[position] + factor * total, total)
        sums.append(total)
    return torch.stack(sums[::-1], 1).to(x.device)


class ReturnCalculator:
    """Adds `return` to state-action pairs."""

    def add_reward_to_go(self, sa_pairs: PairsLike, gamma: float | Tensor) -> SAPairs:
        pairs = as_pairs(sa_pairs)
        return pairs.with_columns(**{"return": discounted_sum(pairs.column("reward"), pairs.mask, gamma)})
