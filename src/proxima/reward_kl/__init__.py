"""Per-token rewards: the score minus the KL penalty (phase 3 of a PPO step).

In: pairs with log-probabilities, one score per sequence. Out: pairs with `kl` and `reward`; the next KL
coefficient.
"""

from proxima.reward_kl.kl_budget import SHORTEST_LAG, KLBudget
from proxima.reward_kl.kl_controller import adapt_kl_coef
from proxima.reward_kl.kl_divergence import KLDivergence
from proxima.reward_kl.reward_adjuster import RewardAdjuster, shape_scores

__all__ = [
    "SHORTEST_LAG",
    "KLBudget",
    "KLDivergence",
    "RewardAdjuster",
    "adapt_kl_coef",
    "shape_scores",
]
