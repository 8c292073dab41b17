"""KL, adjusted rewards and the adaptive coefficient against the oracles."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.reward_kl import KLBudget, KLDivergence, RewardAdjuster, adapt_kl_coef
from tests import oracles
from tests.formula_cases import batches, column, flat, near, number, plain, ragged, sweep


@sweep
@given(batch=batches("logprob_policy", "logprob_ref"))
def test_kl(batch):
    expected = [
        oracles.kl(token["logprob_policy"], token["logprob_ref"]) for tokens in batch for token in tokens
    ]
    assert column(KLDivergence().add_kl_to_sa_pairs(plain(batch)), "kl") == near(expected)


@sweep
@given(batch=batches("logprob_policy"))
def test_kl_of_the_reference_with_itself_is_exactly_zero(batch):
    same = [{**pair, "logprob_ref": pair["logprob_policy"]} for pair in plain(batch)]
    assert column(KLDivergence().add_kl_to_sa_pairs(same), "kl") == [0.0] * len(same)


@sweep
@given(batch=batches("kl"), kl_coef=number(0, 1), data=st.data())
def test_sequence_reward_sits_on_the_last_token(batch, kl_coef, data):
    rewards = data.draw(st.lists(number(), min_size=len(batch), max_size=len(batch)))
    expected = [
        oracles.adjusted_rewards(reward, kls, kl_coef)
        for reward, kls in zip(rewards, ragged(batch, "kl"), strict=True)
    ]
    adjusted = RewardAdjuster().adjust_rewards_with_kl(plain(batch), rewards, kl_coef)
    assert column(adjusted, "reward") == near(flat(expected))


@sweep
@given(batch=batches("kl", "token_reward"), kl_coef=number(0, 1))
def test_token_rewards(batch, kl_coef):
    rewards = ragged(batch, "token_reward")
    expected = [
        oracles.adjusted_token_rewards(own, kls, kl_coef)
        for own, kls in zip(rewards, ragged(batch, "kl"), strict=True)
    ]
    pairs = plain([[{"kl": token["kl"]} for token in tokens] for tokens in batch])
    assert column(RewardAdjuster().adjust_rewards_with_kl(pairs, rewards, kl_coef), "reward") == near(
        flat(expected)
    )


def test_integer_rewards_lose_no_fraction():
    pairs = plain([[{"kl": 0.5}, {"kl": 0.25}]])
    adjusted = RewardAdjuster().adjust_rewards_with_kl(pairs, [1], 0.1)
    assert column(adjusted, "reward") == near([-0.05, 0.975])


@pytest.mark.parametrize(
    "rewards",
    [
        pytest.param([1.0], id="one sequence short"),
        pytest.param([1.0, 2.0, 3.0], id="a reward per token, flat"),
        pytest.param([], id="none"),
        pytest.param([1.0, math.nan], id="nan"),
        pytest.param([-math.inf, 1.0], id="infinite"),
        pytest.param([[1.0, 2.0], [1.0, 2.0]], id="a token too many"),
        pytest.param([[1.0, 2.0]], id="token rewards of one sequence"),
        pytest.param([[1.0, math.nan], [1.0]], id="nan on a token"),
    ],
)
def test_bad_rewards_are_refused(rewards):
    pairs = plain([[{"kl": 0.1}, {"kl": 0.2}], [{"kl": 0.3}]])
    with pytest.raises(ValueError, match="reward"):
        RewardAdjuster().adjust_rewards_with_kl(pairs, rewards, 0.1)


@sweep
@given(
    coef=number(1e-3, 1),
    kl=number(-5, 50),
    target=number(0.5, 10),
    horizon=st.integers(100, 10**5),
    n=st.integers(1, 10**6),
)
def test_adaptive_coefficient(coef, kl, target, horizon, n):
    assert adapt_kl_coef(coef, kl, target, horizon, n) == near(
        oracles.adapt_kl_coef(coef, kl, target, horizon, n)
    )


def test_adaptive_coefficient_rests_at_its_target():
    assert adapt_kl_coef(0.1, 6.0, 6.0, 10_000, 512) == 0.1


@pytest.mark.parametrize("n", [501, 512, 10_000])
def test_a_batch_of_many_horizons_leaves_the_coefficient_positive_and_moves_it_by_a_fifth_at_most(n):
    assert adapt_kl_coef(0.1, 0.0, 6.0, 100, n) == near(0.08)
    assert adapt_kl_coef(0.1, 600.0, 6.0, 100, n) == near(0.12)


@pytest.mark.parametrize("n", [1, 32, 99, 100])
@pytest.mark.parametrize("kl", [0.0, 5.3, 6.5, 20.0])
def test_up_to_one_horizon_the_bound_changes_no_bit(kl, n):
    error = min(max(kl / 6.0 - 1.0, -0.2), 0.2)
    assert adapt_kl_coef(0.1, kl, 6.0, 100, n) == 0.1 * (1.0 + error * n / 100)


def test_a_step_that_measured_no_kl_leaves_the_coefficient_as_it_was():
    assert adapt_kl_coef(0.1, math.nan, 6.0, 100, 32) == 0.1


@sweep
@given(
    spread=number(1e-2, 100),
    target=number(0.5, 10),
    kls=st.lists(number(0, 30), min_size=1, max_size=40),
)
def test_budget(spread, target, kls):
    budget = KLBudget(target)
    coefs = [budget.begin(spread)]
    for kl in kls:
        coefs.append(budget.next_coef(coefs[-1], kl))
    assert coefs == near(oracles.kl_budget(spread, target, kls))
