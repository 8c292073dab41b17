"""Advantages and value targets: how much better than expected (phase 5 of a PPO step).

In: pairs with `reward` and `value`. Out: pairs with `td_error`, `advantage` and `return`.
"""

from proxima.advantage.estimators import (
    ESTIMATORS,
    add_credit,
    compute_advantages,
    estimate,
    whiten_advantages,
)
from proxima.advantage.gae import GAEParts, Terms
from proxima.advantage.gae_advantage import GAEAdvantage
from proxima.advantage.group_scores import group_scores
from proxima.advantage.outcome import Credit, Outcome
from proxima.advantage.return_calculator import ReturnCalculator
from proxima.advantage.td_error import TDError

__all__ = [
    "ESTIMATORS",
    "Credit",
    "GAEAdvantage",
    "GAEParts",
    "Outcome",
    "ReturnCalculator",
    "TDError",
    "Terms",
    "add_credit",
    "compute_advantages",
    "estimate",
    "group_scores",
    "whiten_advantages",
]
