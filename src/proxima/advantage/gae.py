"""GAE as an estimator: the value model's targets, lambda by response length (`lam_alpha`), discounting by
turns; three parts may be replaced.

Policy and value model have a lambda each (Yuan et al. 2025, VC-PPO). The value model's target is the
discounted reward-to-go for a `value_lam` of 1, and A_t + V(s_t) with its own lambda otherwise. With
`lam_alpha` the policy's lambda grows with the length l of a response (Yue et al. 2025, VAPO):

    lambda = clamp(1 - 1 / (lam_alpha * l), 0, 1)

In an episode of several turns, gamma and lambda act at every token, or, by turns, at the last token of each
turn alone: the tokens of a turn are then one action, and 1 takes the place of both between them. The length l
counts what lambda acts at: all tokens that the policy chose in the episode, not those it read; by turns, the
turns. So (1 - 1 / (lam_alpha l))^l, what is left of a final score at the beginning, is about
exp(-1 / lam_alpha) either way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxima.advantage.gae_advantage import GAEAdvantage
from proxima.advantage.outcome import Credit, Outcome
from proxima.advantage.return_calculator import ReturnCalculator
from proxima.advantage.td_error import TDError
from proxima.core.ops import turn_ends
from proxima.core.pairs import SAPairs, rejoin


class GAEParts(NamedTuple):
    """The three formulas of GAE; each may be replaced by anything with the same method."""

    td_error: TDError = TDError()
    gae_advantage: GAEAdvantage = GAEAdvantage()
    return_calculator: ReturnCalculator = ReturnCalculator()


class Terms(NamedTuple):
    """What an estimator is told besides the outcome."""

    gamma: float
    lam: float
    lam_alpha: float = 0.0  # above 0: the length-adaptive lambda, instead of `lam`
    value_lam: float | None = None  # lambda of the value model's target; None: the policy's
    parts: GAEParts = GAEParts()
    by_turns: bool = False  # gamma and lambda act at the ends of turns alone


def adaptive_lam(steps: Tensor, lam_alpha: float) -> Tensor:
    """(B, R) -> (B,), in float32.

    Args:
        steps: True where lambda acts.
    """
    return (1 - 1 / (lam_alpha * steps.sum(1).clamp(min=1))).clamp(0, 1)


def at_turn_ends(factor: float | Tensor, pairs: SAPairs) -> Tensor:
    """A factor, one for all or one for each row (B,), as (B, R): 1 except for the last token of each turn."""
    reward = pairs.column("reward")
    given = factor.unsqueeze(1).to(reward) if isinstance(factor, Tensor) else reward.new_tensor(factor)
    return torch.where(turn_ends(pairs.mask), given, reward.new_ones(()))


def gae(outcome: Outcome, terms: Terms) -> Credit:
    parts = terms.parts
    pairs = outcome.as_pairs(terms.gamma)
    gamma: float | Tensor = terms.gamma
    steps = turn_ends(pairs.mask) if terms.by_turns else pairs.mask
    lam = adaptive_lam(steps, terms.lam_alpha) if terms.lam_alpha > 0 else terms.lam
    value_lam: float | Tensor | None = terms.value_lam
    if terms.by_turns:
        gamma, lam = at_turn_ends(gamma, pairs), at_turn_ends(lam, pairs)
    errors = parts.td_error.compute_td_errors(pairs, gamma)
    found = rejoin(parts.gae_advantage.compute_gae_advantages(errors, gamma, lam), pairs)
    advantages = found.column("advantage")
    if value_lam is None:
        targets = advantages + found.column("value")
    elif terms.value_lam == 1:
        targets = rejoin(parts.return_calculator.add_reward_to_go(found, gamma), pairs).column("return")
    else:
        value_lam = at_turn_ends(value_lam, pairs) if terms.by_turns else value_lam
        other = rejoin(parts.gae_advantage.compute_gae_advantages(found, gamma, value_lam), pairs)
        targets = other.column("advantage") + found.column("value")
    return Credit(advantages, targets, found.columns.get("td_error"))
