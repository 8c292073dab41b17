"""The terms of a reward model's loss, as pure formulas. In: scores. Out: one loss per pair or answer.

    preference   -(1 - e) log sigmoid(d) - e log sigmoid(-d),  d = r(chosen) - r(rejected) - margin

with the label smoothing e (Bradley-Terry where e = 0); a tie has e = 1/2 and no margin: its loss is least
where both scores are equal. The language-model loss is the mean of -log p over the tokens of an answer (GRM,
Yang et al. 2024, arXiv 2406.10216). The score penalty is the mean square of the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def preference_loss(differences: Tensor, margins: Tensor, ties: Tensor, smoothing: float = 0.0) -> Tensor:
    """Loss of pairs, of the shape of the differences: (B,), or (B, heads).

    Args:
        differences: r(chosen) - r(rejected).
        margins: by how much it should be more than 0; not read for ties.
        ties: bool.
        smoothing: share of labels that count as the wrong way round.
    """
    wrong = torch.where(ties, torch.full_like(differences, 0.5), smoothing)
    distance = torch.where(ties, differences, differences - margins)
    return -(1 - wrong) * logsigmoid(distance) - wrong * logsigmoid(-distance)


def mean_by_answer(losses: Tensor, sizes: Tensor) -> Tensor:
    """The mean (B,) of per-token losses (M,) over each answer of `sizes` (B,) tokens."""
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    return losses.new_zeros(len(sizes)).index_add(0, owner, losses) / sizes


def score_penalty(scores: Tensor) -> Tensor:
    """The mean square (B,) of the scores (B, answers of an example)."""
    return scores.square().mean(1)
