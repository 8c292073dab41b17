"""Phase 5 of a PPO step: how much better than expected.

In: pairs with `reward` and `value`. Out: pairs with `td_error`, `advantage` and `return`.
"""

from proxima.advantage.estimators import (
    GAEParts,
    add_estimates,
    compute_advantages,
    estimate,
    whiten_advantages,
)
from proxima.advantage.gae_advantage import GAEAdvantage
from proxima.advantage.return_calculator import ReturnCalculator
from proxima.advantage.td_error import TDError

__all__ = [
    "GAEAdvantage",
    "GAEParts",
    "ReturnCalculator",
    "TDError",
    "add_estimates",
    "compute_advantages",
    "estimate",
    "whiten_advantages",
]
