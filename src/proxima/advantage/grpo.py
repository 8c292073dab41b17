"""GRPO (Shao et al. 2024): (s - mean) / (std + 1e-4) within a group, std with Bessel's correction.

Dr. GRPO (Liu et al. 2025) leaves the std out, which weighs easy and hard prompts more than others.
"""

from __future__ import annotations

import torch

from proxima.advantage.gae import Terms
from proxima.advantage.group_scores import credit_to_go, group_scores
from proxima.advantage.outcome import Credit, Outcome

STD_EPS = 1e-4


def grpo(outcome: Outcome, terms: Terms) -> Credit:
    found = group_scores(outcome)
    scaled = (found.scores - found.means) / (found.stds + STD_EPS)
    return credit_to_go(outcome, torch.where(found.equal, 0.0, scaled))


def dr_grpo(outcome: Outcome, terms: Terms) -> Credit:
    found = group_scores(outcome)
    return credit_to_go(outcome, torch.where(found.equal, 0.0, found.scores - found.means))
