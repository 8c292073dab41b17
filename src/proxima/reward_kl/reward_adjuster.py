"""Per-token rewards: reward_t = score_t - kl_coef * kl_t, the score on a sequence's last real token;
penalty, normalisation and clipping of scores."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from proxima.core.ops import place_rewards
from proxima.core.pairs import PairsLike, SAPairs, as_pairs


class RewardAdjuster:
    """Adds `reward` to state-action pairs."""

    def adjust_rewards_with_kl(
        self,
        sa_pairs: PairsLike,
        rewards: Tensor | Sequence[float] | Sequence[Sequence[float]],
        kl_coef: float,
    ) -> SAPairs:
        """
        Args:
            rewards: one finite number per sequence; or, for per-token rewards, one row per sequence.
            kl_coef: weight of the KL penalty.
        """
        pairs = as_pairs(sa_pairs)
        kl = pairs.column("kl")
        return pairs.with_columns(reward=place_rewards(rewards, pairs.mask, kl) - kl_coef * kl)


def shape_scores(
    scores: Tensor,
    ended: Tensor,
    missing_eos_penalty: float = 0.0,
    normalize: bool = False,
    clip: float = 0.0,
) -> Tensor:
    """Scores (B,) as PPO sees them: minus a penalty where no EOS came, normalised over the batch, clipped to
    +-clip.

    Failed scores are nan: they stay nan and have no share in the mean and the standard deviation.
    """
    scores = scores - missing_eos_penalty * (~ended)
    if normalize:
        valid = scores[~scores.isnan()]
        scores = (scores - valid.mean()) / (valid.std(correction=0) + 1e-8)
    return scores.clamp(-clip, clip) if clip > 0 else scores
