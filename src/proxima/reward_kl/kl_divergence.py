"""Per-token KL: kl_t = logprob_policy_t - logprob_ref_t.

The policy is the one that acted (truncated and renormalised), the reference has its whole vocabulary, both at
the sampling temperature: an unbiased sample (k1) of KL(acting policy || reference), never negative in
expectation, single tokens may be.
"""

from __future__ import annotations

from proxima.core.pairs import PairsLike, SAPairs, as_pairs


class KLDivergence:
    """Adds `kl` to state-action pairs."""

    def add_kl_to_sa_pairs(self, sa_pairs: PairsLike) -> SAPairs:
        pairs = as_pairs(sa_pairs)
        return pairs.with_columns(kl=pairs.column("logprob_policy") - pairs.column("logprob_ref"))
