"""What an estimator of advantages reads and gives: `Outcome` of a rollout in, `Credit` of its tokens out.

Masks may have holes: tokens that the policy did not choose. They are skipped, as if they were not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from proxima.core.ops import last_real
from proxima.core.pairs import PlainPairs, SAPairs


class Credit(NamedTuple):
    """All (B, R)."""

    advantages: Tensor  # not whitened
    targets: Tensor | None  # of the value model; None where the method has none
    td_errors: Tensor | None = None  # where the method computes them


@dataclass(frozen=True)
class Outcome:
    """What a rollout earned: the reward of a token is its score minus its KL cost."""

    scores: Tensor  # (B, R), a sequence's one score on its last real token
    kl_cost: Tensor  # (B, R), kl_coef * kl
    mask: Tensor  # (B, R), may have holes
    values: Tensor | None = None  # (B, R); None without a value model
    after: Tensor | None = None  # (B,) V after the last token of a cut response, 0 for a finished one
    groups: Tensor | None = None  # (B,) equal numbers for responses to one prompt; None: one group each
    pairs: SAPairs | None = None  # its source, for replaced parts of GAE

    @staticmethod
    def of_pairs(pairs: SAPairs, scores: Tensor, after: Tensor | None = None) -> Outcome:
        """From pairs with `reward`; `value` and `group` where they have them.

        Args:
            scores: (B, R), without KL: what the rewards lack of them is the KL's cost.
        """
        group = pairs.columns.get("group")
        return Outcome(
            scores=scores,
            kl_cost=scores - pairs.column("reward"),
            mask=pairs.mask,
            values=pairs.columns.get("value"),
            after=after,
            groups=None if group is None else group[:, 0],
            pairs=pairs,
        )

    def as_pairs(self, gamma: float) -> SAPairs:
        """Pairs with `reward` and `value`; a cut response's last reward includes gamma * V after it."""
        pairs = self.pairs
        if pairs is None:
            if self.values is None:
                raise ValueError("GAE needs values, and the outcome has none")
            columns = {"reward": self.scores - self.kl_cost, "value": self.values}
            pairs = PlainPairs(self.mask, columns)
        if self.after is None:
            return pairs
        reward = pairs.column("reward")
        later = torch.where(
            last_real(self.mask), gamma * self.after.to(reward).unsqueeze(1), reward.new_zeros(())
        )
        return pairs.with_columns(reward=reward + later)

    @property
    def sequence_scores(self) -> Tensor:
        """(B,)"""
        return torch.where(self.mask, self.scores, self.scores.new_zeros(())).sum(1)
