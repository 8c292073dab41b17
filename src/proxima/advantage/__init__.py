"""Phase 5 of a PPO step: how much better than expected.

In: pairs with `reward` and `value`. Out: pairs with `td_error`, `advantage` and `return`.
"""

from proxima.advantage.gae_advantage import GAEAdvantage, compute_advantages
from proxima.advantage.return_calculator import ReturnCalculator
from proxima.advantage.td_error import TDError

__all__ = ["GAEAdvantage", "ReturnCalculator", "TDError", "compute_advantages"]
