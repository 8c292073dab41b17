"""REINFORCE++ (Hu et al. 2025): the score itself, or the score minus the mean of its group.

Its scale comes from whitening over all tokens of the rollout, which `whiten_advantages` does.
"""

from __future__ import annotations

from proxima.advantage.gae import Terms
from proxima.advantage.group_scores import credit_to_go
from proxima.advantage.grpo import dr_grpo
from proxima.advantage.outcome import Credit, Outcome


def reinforce_plus_plus(outcome: Outcome, terms: Terms) -> Credit:
    return credit_to_go(outcome, outcome.sequence_scores)


def reinforce_plus_plus_baseline(outcome: Outcome, terms: Terms) -> Credit:
    return dr_grpo(outcome, terms)
