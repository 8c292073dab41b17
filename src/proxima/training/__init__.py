"""Phase 7 of a PPO step, its formulas: the per-token losses.

In: new and old log-probabilities, advantages, values, returns. Out: loss tensors (B, R), not yet averaged.
"""

from proxima.training.importance import add_importance_weights, importance_weights
from proxima.training.policy_loss import clipped, policy_loss
from proxima.training.policy_ratio import approximate_kl, policy_ratio
from proxima.training.schedule import learning_rate_factor
from proxima.training.value_loss import value_loss

__all__ = [
    "add_importance_weights",
    "approximate_kl",
    "clipped",
    "importance_weights",
    "learning_rate_factor",
    "policy_loss",
    "policy_ratio",
    "value_loss",
]
