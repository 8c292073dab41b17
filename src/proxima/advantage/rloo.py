"""RLOO (Ahmadian et al. 2024): the score minus the mean of the other scores of its group; unbiased."""

from __future__ import annotations

import torch

from proxima.advantage.gae import Terms
from proxima.advantage.group_scores import credit_to_go, group_scores
from proxima.advantage.outcome import Credit, Outcome


def rloo(outcome: Outcome, terms: Terms) -> Credit:
    found = group_scores(outcome)
    # s - (n mean - s) / (n - 1) = (s - mean) n / (n - 1)
    factor = found.sizes.double() / (found.sizes - 1).clamp(min=1)
    return credit_to_go(outcome, torch.where(found.equal, 0.0, (found.scores - found.means) * factor))
