"""Generalised advantage estimation (Schulman et al. 2016): A_t = delta_t + gamma * lam * A_{t+1}, within a
sequence."""

from __future__ import annotations

from torch import Tensor

from proxima.advantage.return_calculator import discounted_sum
from proxima.advantage.td_error import TDError
from proxima.core.pairs import PairsLike, SAPairs, as_pairs


class GAEAdvantage:
    """Adds `advantage` to state-action pairs (and `td_error`, where it is not there yet)."""

    def compute_gae_advantages(
        self, sa_pairs: PairsLike, gamma: float | Tensor, lam: float | Tensor
    ) -> SAPairs:
        """
        Args:
            gamma: one for all tokens, or one for each (B, R).
            lam: one for all sequences, one for each (B,), or, as gamma, one for each token.
        """
        pairs = as_pairs(sa_pairs)
        if "td_error" not in pairs.columns:
            pairs = TDError().compute_td_errors(pairs, gamma)
        return pairs.with_columns(advantage=discounted_sum(pairs.column("td_error"), pairs.mask, gamma * lam))
