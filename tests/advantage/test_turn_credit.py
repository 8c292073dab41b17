"""Episodes of several turns: GAE over the policy's own tokens, with the value that it reads before its next
one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxima.advantage import Outcome, estimate
from proxima.core.ops import turn_ends
from tests import oracles
from tests.formula_cases import near, number, short_sweep

READ, LAST = 60, 20  # tokens between the two turns, and of the second


def gae(rewards, values, mask, gamma, lam, **terms):
    rewards, values = (torch.tensor([row], dtype=torch.float64) for row in (rewards, values))
    outcome = Outcome(rewards, torch.zeros_like(rewards), torch.tensor([mask]), values)
    return estimate("gae", outcome, gamma, lam, **terms)


def test_two_turns_with_sixty_tokens_between():
    """The value is 0.5 everywhere and the reward 1: the first turn's last token gets 0.95^20 * 0.5 = 0.179.
    As steps, the tokens between would dilute it to 0.008; with a value of 0 there it would be -0.469."""
    rewards = [0.0] * (1 + READ + LAST - 1) + [1.0]
    values = [0.5] * len(rewards)
    acted = [True] + [False] * READ + [True] * LAST
    found = gae(rewards, values, acted, 1.0, 0.95).advantages[0, 0]
    assert float(found) == pytest.approx(0.95**LAST * 0.5, rel=1e-12)
    assert round(float(found), 3) == 0.179
    everything = [True] * len(rewards)
    assert round(float(gae(rewards, values, everything, 1.0, 0.95).advantages[0, 0]), 3) == 0.008
    blind = [0.5] + [0.0] * READ + [0.5] * LAST
    assert round(float(gae(rewards, blind, everything, 1.0, 0.95).advantages[0, 0]), 3) == -0.469


def test_a_turn_ends_before_a_hole_and_at_the_last_token():
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 1, 0, 0, 0]]).bool()
    expected = [[0, 1, 0, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0, 0]]
    assert turn_ends(mask).int().tolist() == expected


@short_sweep
@given(
    turns=st.lists(st.lists(st.tuples(number(), number()), min_size=1, max_size=4), min_size=1, max_size=3),
    gap=st.integers(1, 3),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.7, 1.0]),
    value_lam=st.sampled_from([None, 0.5, 1.0]),
)
def test_by_turns_both_factors_act_between_turns_alone(turns, gap, gamma, lam, value_lam):
    """Against the recursion over the policy's tokens, each with factors of its own."""
    rewards: list[float] = []
    values: list[float] = []
    mask: list[bool] = []
    for turn in turns:
        if mask:
            rewards, values, mask = rewards + [77.0] * gap, values + [-99.0] * gap, mask + [False] * gap
        rewards += [cell[0] for cell in turn]
        values += [cell[1] for cell in turn]
        mask += [True] * len(turn)
    cells = [cell for turn in turns for cell in turn]
    last = [place == len(turn) - 1 for turn in turns for place in range(len(turn))]

    def credit(factor):
        later, after, found = 0.0, 0.0, []
        for (reward, value), ends in reversed(list(zip(cells, last, strict=True))):
            delta = reward + (gamma if ends else 1.0) * after - value
            later = delta + (gamma * factor if ends else 1.0) * later
            after = value
            found.append(later)
        return found[::-1]

    result = gae(rewards, values, mask, gamma, lam, value_lam=value_lam, by_turns=True)
    real = torch.tensor(mask)
    assert result.advantages[0][real].tolist() == near(credit(lam))
    target = [
        advantage + value
        for advantage, (_, value) in zip(credit(lam if value_lam is None else value_lam), cells, strict=True)
    ]
    assert result.targets[0][real].tolist() == near(target)


@pytest.mark.parametrize("alpha", [0.4, 1.5])
@pytest.mark.parametrize(("by_turns", "steps"), [(False, 6), (True, 3)])
def test_the_length_that_lambda_follows_counts_what_it_acts_at(alpha, by_turns, steps):
    """Turns of 3, 2 and 1 tokens with 4 read between them: 6 tokens, or 3 turns."""
    mask = [True] * 3 + [False] * 4 + [True] * 2 + [False] * 4 + [True]
    rewards = [0.1 * i for i in range(len(mask))]
    values = [0.5 - 0.07 * i for i in range(len(mask))]
    lam = oracles.adaptive_lambda(steps, alpha)
    found = gae(rewards, values, mask, 0.9, 0.123, lam_alpha=alpha, by_turns=by_turns)
    expected = gae(rewards, values, mask, 0.9, lam, by_turns=by_turns)
    real = torch.tensor(mask)
    # lambda by length is float32
    assert found.advantages[0][real].tolist() == pytest.approx(
        expected.advantages[0][real].tolist(), abs=1e-6
    )


def test_turns_of_one_token_are_discounted_as_tokens_are():
    rewards, values, mask = (
        [1.0, 9.0, 2.0, 9.0, 3.0],
        [0.5, 9.0, 0.25, 9.0, 0.125],
        [True, False] * 2 + [True],
    )
    expected = oracles.gae(oracles.td_errors([1.0, 2.0, 3.0], [0.5, 0.25, 0.125], 0.9), 0.9, 0.8)
    for by_turns in (False, True):
        found = gae(rewards, values, mask, 0.9, 0.8, by_turns=by_turns).advantages[0]
        assert found[torch.tensor(mask)].tolist() == near(expected)
