"""Scores compared with the other responses to the same prompt (a group): baseline, deviation, groups whose
scores are all equal.

The advantage of a token is its response's centred score minus the KL cost from this token on: the KL of
earlier tokens is not its doing. Neither is discounted. A group of one, or one whose scores differ by no more
than 1e-6 (of the largest, where that is above 1), teaches nothing: its centred scores are exactly 0, where
rounding would be scaled up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxima.advantage.outcome import Credit, Outcome
from proxima.advantage.return_calculator import discounted_sum

EQUAL_SCORES = 1e-6


class GroupScores(NamedTuple):
    """Of each response (B,), float64, on the CPU: MPS has no float64."""

    scores: Tensor
    sizes: Tensor  # responses in its group
    means: Tensor  # of its group
    stds: Tensor  # of its group, with Bessel's correction; 0 in a group of one
    equal: Tensor  # bool: its group teaches nothing


def group_scores(outcome: Outcome) -> GroupScores:
    """A response whose reward failed is not in the outcome, and so has no share in its group's numbers."""
    scores = outcome.sequence_scores.cpu().double()
    groups = torch.arange(len(scores)) if outcome.groups is None else outcome.groups.cpu()
    same = groups.unsqueeze(0) == groups.unsqueeze(1)  # (B, B)
    sizes = same.sum(1)
    table = scores.unsqueeze(0).expand_as(same)
    means = torch.where(same, table, 0.0).sum(1) / sizes
    squares = torch.where(same, (table - means.unsqueeze(1)) ** 2, 0.0).sum(1)
    highest = torch.where(same, table, -torch.inf).amax(1)
    lowest = torch.where(same, table, torch.inf).amin(1)
    largest = torch.maximum(highest.abs(), lowest.abs())
    equal = (sizes == 1) | (highest - lowest <= EQUAL_SCORES * largest.clamp(min=1))
    return GroupScores(scores, sizes, means, (squares / (sizes - 1).clamp(min=1)).sqrt(), equal)


def credit_to_go(outcome: Outcome, centred: Tensor) -> Credit:
    """Advantages (B, R) from centred scores (B,)."""
    cost = discounted_sum(outcome.kl_cost, outcome.mask, 1.0)
    spread = centred.to(cost).unsqueeze(1).expand_as(cost)
    return Credit(torch.where(outcome.mask, spread - cost, cost.new_zeros(())), None)
