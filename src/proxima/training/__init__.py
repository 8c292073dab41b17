"""Objectives, losses, importance weights, learning-rate schedules: the formulas of the update (phase 7 of a
PPO step).

In: new and old log-probabilities, advantages, values, returns. Out: loss tensors (B, R), not yet averaged.
"""

from proxima.training.importance import add_importance_weights, correction, importance_weights
from proxima.training.kl_loss import kl_loss
from proxima.training.moved import Moved
from proxima.training.objectives import policy_objective
from proxima.training.policy_loss import clipped, policy_loss
from proxima.training.policy_ratio import approximate_kl, policy_ratio
from proxima.training.schedule import learning_rate_factor
from proxima.training.token_weights import TokenWeights, token_weights
from proxima.training.value_loss import value_loss

__all__ = [
    "Moved",
    "TokenWeights",
    "add_importance_weights",
    "approximate_kl",
    "clipped",
    "correction",
    "importance_weights",
    "kl_loss",
    "learning_rate_factor",
    "policy_loss",
    "policy_objective",
    "policy_ratio",
    "token_weights",
    "value_loss",
]
