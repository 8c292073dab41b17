"""TD errors, GAE, reward-to-go and `compute_advantages` against the oracles and closed forms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxima.advantage import (
    GAEAdvantage,
    GAEParts,
    Outcome,
    ReturnCalculator,
    TDError,
    compute_advantages,
    estimate,
    whiten_advantages,
)
from proxima.core.pairs import PlainPairs
from tests import oracles
from tests.formula_cases import (
    GRID,
    LENGTHS,
    batches,
    column,
    flat,
    near,
    number,
    padded,
    plain,
    ragged,
    short_sweep,
    sweep,
)

gammas = pytest.mark.parametrize("gamma", GRID)
lams = pytest.mark.parametrize("lam", GRID)


def expected_advantages(rewards, values, gamma, lam):
    """Ragged lists in, ragged lists out."""
    deltas = [oracles.td_errors(r, v, gamma) for r, v in zip(rewards, values, strict=True)]
    return [oracles.gae_double_sum(d, gamma, lam) for d in deltas]


def on_last_token(rewards, values):
    return [[0.0] * (len(v) - 1) + [r] for r, v in zip(rewards, values, strict=True)]


def added(a, b):
    return [[x + y for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)]


def as_lists(x, mask):
    return [row[real].tolist() for row, real in zip(x, mask, strict=True)]


# --- the phases
# ------------------------------------------------------------------------------------------------------


@gammas
@short_sweep
@given(batch=batches("reward", "value"))
def test_td_errors_and_reward_to_go(gamma, batch):
    rewards, values = ragged(batch, "reward"), ragged(batch, "value")
    deltas = [oracles.td_errors(r, v, gamma) for r, v in zip(rewards, values, strict=True)]
    assert column(TDError().compute_td_errors(plain(batch), gamma), "td_error") == near(flat(deltas))
    returns = [oracles.reward_to_go(r, gamma) for r in rewards]
    assert column(ReturnCalculator().add_reward_to_go(plain(batch), gamma), "return") == near(flat(returns))


@gammas
@lams
@short_sweep
@given(batch=batches("reward", "value"))
def test_gae(gamma, lam, batch):
    expected = flat(expected_advantages(ragged(batch, "reward"), ragged(batch, "value"), gamma, lam))
    assert column(GAEAdvantage().compute_gae_advantages(plain(batch), gamma, lam), "advantage") == near(
        expected
    )


@gammas
@lams
@short_sweep
@given(batch=batches("td_error"))
def test_gae_from_given_td_errors_alone(gamma, lam, batch):
    expected = flat([oracles.gae_double_sum(d, gamma, lam) for d in ragged(batch, "td_error")])
    assert column(GAEAdvantage().compute_gae_advantages(plain(batch), gamma, lam), "advantage") == near(
        expected
    )


@sweep
@given(batch=batches("td_error", "reward", "value"))
def test_given_td_errors_go_before_reward_and_value(batch):
    expected = flat([oracles.gae(d, 0.9, 0.8) for d in ragged(batch, "td_error")])
    assert column(GAEAdvantage().compute_gae_advantages(plain(batch), 0.9, 0.8), "advantage") == near(
        expected
    )


# --- closed forms
# ----------------------------------------------------------------------------------------------------


@gammas
@short_sweep
@given(batch=batches("reward", "value"))
def test_lam_1_is_reward_to_go_minus_value(gamma, batch):
    pairs = plain(batch)
    advantages = column(GAEAdvantage().compute_gae_advantages(pairs, gamma, 1.0), "advantage")
    returns = column(ReturnCalculator().add_reward_to_go(pairs, gamma), "return")
    assert advantages == near([r - pair["value"] for r, pair in zip(returns, pairs, strict=True)])


@gammas
@short_sweep
@given(batch=batches("reward", "value"))
def test_lam_0_is_the_td_error(gamma, batch):
    pairs = plain(batch)
    advantages = column(GAEAdvantage().compute_gae_advantages(pairs, gamma, 0.0), "advantage")
    assert advantages == near(column(TDError().compute_td_errors(pairs, gamma), "td_error"))


@sweep
@given(batch=batches("reward"), value=number())
def test_constant_value_without_discount(batch, value):
    """gamma = lam = 1: the constant cancels everywhere but once."""
    pairs = [{**pair, "value": value} for pair in plain(batch)]
    expected = [sum(r[t:]) - value for r in ragged(batch, "reward") for t in range(len(r))]
    assert column(GAEAdvantage().compute_gae_advantages(pairs, 1.0, 1.0), "advantage") == near(expected)


@gammas
@lams
@short_sweep
@given(lengths=LENGTHS, value=number())
def test_constant_value_and_constant_reward(gamma, lam, lengths, value):
    """delta = 1 + (gamma - 1) v, and 1 - v at the end, summed as a geometric series."""
    decay = gamma * lam
    expected = []
    for n in lengths:
        for left in range(n - 1, -1, -1):  # tokens after this one
            series = left if decay == 1 else (1 - decay**left) / (1 - decay)
            expected.append(series * (1 + (gamma - 1) * value) + decay**left * (1 - value))
    pairs = plain([[{"reward": 1.0, "value": value}] * n for n in lengths])
    assert column(GAEAdvantage().compute_gae_advantages(pairs, gamma, lam), "advantage") == near(expected)


@gammas
@lams
@short_sweep
@given(batch=batches("reward"))
def test_a_perfect_value_model_leaves_no_advantage(gamma, lam, batch):
    values = flat([oracles.reward_to_go(r, gamma) for r in ragged(batch, "reward")])
    pairs = [{**pair, "value": value} for pair, value in zip(plain(batch), values, strict=True)]
    assert column(GAEAdvantage().compute_gae_advantages(pairs, gamma, lam), "advantage") == near(
        [0.0] * len(pairs)
    )


# --- compute_advantages
# ----------------------------------------------------------------------------------------------


@gammas
@lams
@short_sweep
@given(batch=batches("reward", "value"), data=st.data())
def test_compute_advantages_of_ragged_lists(gamma, lam, batch, data):
    values, token_rewards = ragged(batch, "value"), ragged(batch, "reward")
    scores = data.draw(st.lists(number(), min_size=len(batch), max_size=len(batch)))
    for rewards, spread in ((token_rewards, token_rewards), (scores, on_last_token(scores, values))):
        advantages, returns = compute_advantages(rewards, values, gamma=gamma, lam=lam)
        expected = expected_advantages(spread, values, gamma, lam)
        assert type(advantages) is type(returns) is list
        assert (
            [len(row) for row in advantages] == [len(row) for row in returns] == [len(row) for row in values]
        )
        assert flat(advantages) == near(flat(expected))
        assert flat(returns) == near(flat(added(expected, values)))


@pytest.mark.parametrize(
    ("rewards", "spread"),
    [([0.5, -1.0, 2.0], [0.5, -1.0, 2.0]), ([2.0], [0.0, 0.0, 2.0]), (2.0, [0.0, 0.0, 2.0])],
    ids=["per token", "one sequence", "bare float"],
)
def test_compute_advantages_of_one_flat_sequence_at_the_default_discounts(rewards, spread):
    values = [0.25, 1.0, -0.5]
    advantages, returns = compute_advantages(rewards, values)
    expected = oracles.gae_double_sum(oracles.td_errors(spread, values, 0.99), 0.99, 0.95)
    assert advantages == near(expected)
    assert returns == near([a + v for a, v in zip(expected, values, strict=True)])


def test_compute_advantages_of_integers_loses_no_fraction():
    advantages, returns = compute_advantages([1], [0, 0, 0], gamma=1.0, lam=0.5)
    assert (advantages, returns) == (near([0.25, 0.5, 1.0]), near([0.25, 0.5, 1.0]))


@gammas
@lams
@short_sweep
@given(batch=batches("reward", "value"), padding=st.sampled_from([0.0, 1e3]))
def test_compute_advantages_of_padded_tensors(gamma, lam, batch, padding):
    values, mask = padded(ragged(batch, "value"), padding)
    token_rewards, _ = padded(ragged(batch, "reward"), padding)
    scores = [row[-1] for row in ragged(batch, "reward")]
    score_tensor = torch.tensor(scores, dtype=torch.float64)
    cases = (
        (token_rewards, ragged(batch, "reward")),
        (score_tensor, on_last_token(scores, ragged(batch, "value"))),
    )
    for rewards, spread in cases:
        advantages, returns = compute_advantages(rewards, values, gamma=gamma, lam=lam, mask=mask)
        expected = expected_advantages(spread, ragged(batch, "value"), gamma, lam)
        assert advantages.shape == returns.shape == values.shape
        assert flat(as_lists(advantages, mask)) == near(flat(expected))
        assert flat(as_lists(returns, mask)) == near(flat(added(expected, ragged(batch, "value"))))


def test_compute_advantages_of_full_tensors_needs_no_mask():
    rewards, values = [[0.0, 1.0], [2.0, -1.0]], [[0.5, 0.5], [1.0, 0.0]]
    advantages, returns = compute_advantages(torch.tensor(rewards), torch.tensor(values), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[0.5, 0.5], [0.0, -1.0]]
    assert returns.tolist() == [[1.0, 1.0], [1.0, -1.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_compute_advantages_of_narrow_tensors_is_at_least_float32(dtype):
    """A value head may answer in half precision; advantages must not be rounded to it, nor rewards cut to
    integers."""
    values = torch.tensor([[1, 2, 3]], dtype=dtype)
    advantages, _ = compute_advantages(torch.tensor([0.7]), values, gamma=0.99, lam=0.95)
    expected = oracles.gae(oracles.td_errors([0.0, 0.0, 0.7], [1.0, 2.0, 3.0], 0.99), 0.99, 0.95)
    assert advantages[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "values"),
    [
        ([1.0, 2.0, 3.0], [[0.1, 0.2], [0.3]]),
        ([[1.0, 2.0], [3.0, 4.0]], [[0.1, 0.2], [0.3]]),
        ([1.0, 2.0], [0.1, 0.2, 0.3]),
    ],
    ids=["a sequence too many", "a token too many", "neither per token nor one"],
)
def test_compute_advantages_refuses_shapes_that_do_not_fit(rewards, values):
    with pytest.raises(ValueError, match="reward"):
        compute_advantages(rewards, values)


# --- estimate
# ----------------------------------------------------------------------------------------------


@gammas
@lams
@short_sweep
@given(batch=batches("reward", "value"))
def test_estimate_gives_advantages_and_a_target_with_a_lambda_of_its_own(gamma, lam, batch):
    rewards, values = ragged(batch, "reward"), ragged(batch, "value")
    (table, mask), reward_table = padded(values), padded(rewards)[0]
    expected = expected_advantages(rewards, values, gamma, lam)
    targets = {
        None: added(expected, values),
        1.0: [oracles.reward_to_go(row, gamma) for row in rewards],
        0.3: added(expected_advantages(rewards, values, gamma, 0.3), values),
    }
    outcome = Outcome(reward_table, torch.zeros_like(table), mask, table)
    for value_lam, wanted in targets.items():
        found = estimate("gae", outcome, gamma, lam, value_lam=value_lam)
        assert flat(as_lists(found.advantages, mask)) == near(flat(expected))
        assert flat(as_lists(found.targets, mask)) == near(flat(wanted))
    public = compute_advantages(reward_table, table, gamma, lam, mask)
    again = estimate("gae", outcome, gamma, lam)
    assert all(torch.equal(one, other) for one, other in zip(public, again[:2], strict=True))


def test_estimates_are_made_by_the_parts_that_are_given():
    class Halved(GAEAdvantage):
        def compute_gae_advantages(self, sa_pairs, gamma, lam):
            pairs = super().compute_gae_advantages(sa_pairs, gamma, lam)
            return pairs.with_columns(advantage=pairs.column("advantage") / 2)

    ones = torch.ones(1, 2)
    outcome = Outcome(ones, 0 * ones, ones.bool(), ones)
    whole = estimate("gae", outcome, 1.0, 1.0)
    halved = estimate("gae", outcome, 1.0, 1.0, parts=GAEParts(gae_advantage=Halved()))
    assert whole.advantages.tolist() == [[1, 0]]
    assert halved.advantages.tolist() == [[0.5, 0]]
    assert halved.targets.tolist() == [[1.5, 1]]


def test_whitening_changes_advantages_and_leaves_targets():
    advantages = torch.tensor([[1.0, 3.0], [5.0, 99.0]], dtype=torch.float64)
    columns = {"advantage": advantages, "return": torch.full((2, 2), 7.0)}
    pairs = PlainPairs(torch.tensor([[True, True], [True, False]]), columns)
    white = whiten_advantages(pairs)
    real = white.column("advantage")[pairs.mask]
    assert real.tolist() == near(oracles.whiten([1.0, 3.0, 5.0]))
    assert white.column("return") is columns["return"]


@pytest.mark.parametrize("rewards", [torch.tensor([0.5, -1.0, 2.0]), [0.5, -1.0, 2.0], torch.tensor([2.0])])
def test_compute_advantages_of_one_tensor_is_that_of_the_same_list(rewards):
    values = [0.25, 1.0, -0.5]
    expected = compute_advantages(torch.as_tensor(rewards).tolist(), values)
    for found, wanted in zip(compute_advantages(rewards, torch.tensor(values)), expected, strict=True):
        assert found.shape == (3,)
        assert found.tolist() == pytest.approx(wanted, abs=1e-6)
