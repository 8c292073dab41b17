"""Temporal-difference errors: delta_t = reward_t + gamma * V(s_{t+1}) - V(s_t).

V(s_t) is read at the token before action t, and t + 1 is the next real token. The value after
the last real token is 0, whether the sequence ended or was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proxima.core.pairs import PairsLike, SAPairs, as_pairs


def td_errors(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float | Tensor) -> Tensor:
    """(B, R) -> (B, R); gamma one for all tokens, or one for each (B, R)."""
    values = torch.where(mask, values, values.new_zeros(()))
    width = mask.shape[1]
    places = torch.where(mask, torch.arange(width, device=mask.device), width)
    next_real = places.flip(1).cummin(1).values.flip(1)  # (B, R): the first real token from here on, or R
    following = torch.nn.functional.pad(next_real[:, 1:], (0, 1), value=width)
    next_values = torch.nn.functional.pad(values, (0, 1)).gather(1, following)
    return rewards + gamma * next_values - values


class TDError:
    """Adds `td_error` to state-action pairs."""

    def compute_td_errors(self, sa_pairs: PairsLike, gamma: float | Tensor) -> SAPairs:
        pairs = as_pairs(sa_pairs)
        return pairs.with_columns(
            td_error=td_errors(pairs.column("reward"), pairs.column("value"), pairs.mask, gamma)
        )
