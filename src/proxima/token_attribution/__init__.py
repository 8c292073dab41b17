"""State-action pairs from what was generated: which token did what (phase 2 of a PPO step).

In: a rollout, or a text with log-probabilities. Out: state-action pairs.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.token_attribution.sa_pair_builder import ensure_tokens
    from proxima.token_attribution.token_attribution import TokenAttributor

__all__, __getattr__ = lazy_exports(__name__)
