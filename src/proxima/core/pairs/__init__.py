"""State-action pairs, which go through the whole pipeline: each phase adds a column.

In: a rollout, or a plain `list[dict]`. Out: `SAPairs`, columns (B, R) that read as a list of dicts.
"""

from proxima.core.pairs.plain_dicts import PlainPairs, as_pairs, rejoin
from proxima.core.pairs.sa_pairs import PairsLike, SAPairs, TokenPairs

__all__ = ["PairsLike", "PlainPairs", "SAPairs", "TokenPairs", "as_pairs", "rejoin"]
