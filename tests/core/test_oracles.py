"""The oracles themselves, on numbers worked by hand and on each other, so that an error there cannot hide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import oracles
from tests.formula_cases import GRID, near, number, sweep


def test_one_sequence_by_hand():
    rewards = oracles.adjusted_rewards(reward=2.0, kls=[1.0, -1.0, 3.0], kl_coef=0.5)
    assert rewards == [-0.5, 0.5, 0.5]
    deltas = oracles.td_errors(rewards, values=[1.0, 2.0, 4.0], gamma=0.5)
    assert deltas == [-0.5, 0.5, -3.5]
    assert oracles.gae(deltas, gamma=0.5, lam=0.5) == [-0.59375, -0.375, -3.5]
    assert oracles.reward_to_go(rewards, gamma=0.5) == [-0.125, 0.75, 0.5]


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss"),
    [
        (1.5, 2.0, 0.0, -2.5),  # gain held at 1 + eps
        (0.5, 2.0, 0.0, -1.0),  # loss of a good action counts in full
        (0.5, -2.0, 0.0, 1.5),  # gain held at 1 - eps
        (4.0, -2.0, 0.0, 8.0),  # a bad action counts in full ...
        (4.0, -2.0, 3.0, 6.0),  # ... up to dual_clip times
        (2.0, -2.0, 3.0, 4.0),
        (4.0, 2.0, 3.0, -2.5),  # dual clip leaves good actions alone
    ],
)
def test_policy_loss_by_hand(ratio, advantage, dual_clip, loss):
    assert oracles.policy_loss(ratio, advantage, 0.25, dual_clip) == loss


@pytest.mark.parametrize(
    ("value", "target", "loss"),
    [
        (3.0, 1.0, 4.0),  # moved away from the target: the plain error is the larger
        (3.0, 4.0, 6.25),  # moved towards it too far: held at 1.5
        (1.25, 4.0, 7.5625),  # inside the range both are equal
    ],
)
def test_clipped_value_loss_by_hand(value, target, loss):
    assert oracles.value_loss(value, target, old_value=1.0, value_clip=0.5) == loss
    assert oracles.value_loss(value, target) == (value - target) ** 2


def test_whitening_and_kl_coefficient_by_hand():
    assert oracles.whiten([1.0, 3.0, 5.0, 7.0]) == near([x / (5 + 1e-8) ** 0.5 for x in (-3, -1, 1, 3)])
    assert oracles.masked_mean([1.0, 9.0, 3.0], [True, False, True]) == 2.0
    assert oracles.adapt_kl_coef(0.5, kl=6.6, target=6.0, horizon=100, n=50) == near(0.5 * 1.05)
    assert oracles.adapt_kl_coef(0.5, kl=60.0, target=6.0, horizon=100, n=50) == near(0.5 * 1.1)


@sweep
@given(deltas=st.lists(number(), max_size=7), gamma=st.sampled_from(GRID), lam=st.sampled_from(GRID))
def test_recursive_gae_is_the_double_sum(deltas, gamma, lam):
    assert oracles.gae(deltas, gamma, lam) == near(oracles.gae_double_sum(deltas, gamma, lam))
