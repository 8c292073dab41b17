"""Phase 2 of a PPO step: which token did what.

In: a rollout, or a text with log-probabilities. Out: state-action pairs.
"""

from proxima.token_attribution.token_attribution import TokenAttributor

__all__ = ["TokenAttributor"]
