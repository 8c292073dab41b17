"""Adaptive KL coefficient (Ziegler et al. 2019, section 2.2).

coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(n / horizon, 1)), with kl summed over a sequence
and n sequences seen. The bound of 1 is ours: one step moves the coefficient by a fifth at most, so it stays
positive however large the batch.
"""

from __future__ import annotations

import math


def adapt_kl_coef(coef: float, kl: float, target: float, horizon: float, n: int) -> float:
    """The coefficient after a step of `n` sequences whose mean sequence KL was `kl`."""
    if math.isnan(kl):  # nothing was measured
        return coef
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * min(n, horizon) / horizon)
