"""Phase 2 of a PPO step: which token did what.

In: a rollout, or a text with log-probabilities. Out: state-action pairs.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.token_attribution.sa_pair_builder import ensure_tokens
    from proxima.token_attribution.token_attribution import TokenAttributor

__all__, __getattr__ = lazy_exports(__name__)
