"""State-action pairs, which travel the whole road: each stage adds a column and changes none of its input.

In: a rollout, or a plain `list[dict]`. Out: `SAPairs`, columns (B, R) that read as a list of dicts.
"""

from proxima.core.pairs.plain_dicts import as_pairs, rejoin
from proxima.core.pairs.sa_pairs import SAPairs

__all__ = ["SAPairs", "as_pairs", "rejoin"]
