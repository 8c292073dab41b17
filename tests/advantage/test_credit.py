"""Estimators of advantages beyond GAE against the oracles; masks with holes; cut responses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxima.advantage import (
    ESTIMATORS,
    GAEAdvantage,
    Outcome,
    TDError,
    compute_advantages,
    estimate,
    group_scores,
    whiten_advantages,
)
from proxima.advantage.return_calculator import discounted_sum
from proxima.advantage.td_error import td_errors
from proxima.core.ops import place_rewards
from proxima.core.pairs import PlainPairs
from tests import oracles
from tests.formula_cases import near, number, short_sweep, sweep

REWARDS, VALUES = [0.0, 0.0, 1.0], [0.5, 0.6, 0.8]


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


def outcome(rewards, values, mask=None, after=None):
    """Of one sequence."""
    real = torch.ones(1, len(rewards), dtype=torch.bool) if mask is None else torch.tensor([mask]).bool()
    after = None if after is None else tensor([after])
    scores = tensor([rewards])
    return Outcome(scores, torch.zeros_like(scores), real, tensor([values]), after)


def group_outcome(groups, lengths=None, kl=0.0):
    """Scores of responses, group by group, each on its last token."""
    scores = [score for group in groups for score in group]
    lengths = lengths or [1] * len(scores)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    numbers = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    placed = place_rewards(scores, mask, torch.zeros(mask.shape, dtype=torch.float64))
    return Outcome(placed, kl * torch.ones_like(placed), mask, groups=numbers)


# --- masks with holes
# ----------------------------------------------------------------------------------------------------------


def test_a_hole_is_skipped_and_not_a_token_of_value_0():
    """V(s_1) is compared with V(s_3), the next token that the policy chose: 0.3 + 0.95 * 0.2."""
    found = estimate("gae", outcome(REWARDS, VALUES, [1, 0, 1]), 1.0, 0.95, value_lam=1.0)
    assert found.advantages[0, [0, 2]].tolist() == near([0.49, 0.2])
    assert found.targets[0, [0, 2]].tolist() == near([1.0, 1.0])
    mask = torch.tensor([[True, False, True]])
    assert compute_advantages(tensor([REWARDS]), tensor([VALUES]), 1.0, 0.95, mask)[0][0, 0] == near(0.49)
    # a sequence's one score sits on its last real token, wherever that stands
    assert compute_advantages(tensor([1.0]), tensor([VALUES]), 1.0, 0.95, mask)[0][0, 0] == near(0.49)


@short_sweep
@given(
    rows=st.lists(
        st.lists(st.tuples(number(), number(), st.booleans()), min_size=1, max_size=7), min_size=1, max_size=4
    ),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_holes_are_as_if_they_were_not_there(rows, gamma, lam):
    width = max(map(len, rows))
    full = [row + [(77.0, -99.0, False)] * (width - len(row)) for row in rows]
    rewards, values = (tensor([[cell[i] for cell in row] for row in full]) for i in (0, 1))
    mask = torch.tensor([[cell[2] for cell in row] for row in full])
    deltas, sums = td_errors(rewards, values, mask, gamma), discounted_sum(rewards, mask, gamma)
    found = estimate("gae", Outcome(rewards, torch.zeros_like(rewards), mask, values), gamma, lam)
    for i, real in enumerate(mask):
        if not real.any():  # nothing to be right about
            continue
        own_rewards, own_values = rewards[i][real].tolist(), values[i][real].tolist()
        expected = oracles.td_errors(own_rewards, own_values, gamma)
        assert deltas[i][real].tolist() == near(expected)
        assert sums[i][real].tolist() == near(oracles.reward_to_go(own_rewards, gamma))
        assert found.advantages[i][real].tolist() == near(oracles.gae_double_sum(expected, gamma, lam))


def test_phases_whitening_rewards_and_selection_take_holes():
    mask = torch.tensor([[True, False, True], [True, True, False]])
    columns = {"reward": tensor([REWARDS, REWARDS]), "value": tensor([VALUES, VALUES])}
    pairs = GAEAdvantage().compute_gae_advantages(
        TDError().compute_td_errors(PlainPairs(mask, columns), 1.0), 1.0, 0.95
    )
    raw = pairs.column("advantage")[mask].tolist()
    assert raw[:2] == near([0.49, 0.2])
    assert whiten_advantages(pairs).column("advantage")[mask].tolist() == near(oracles.whiten(raw))
    like = torch.zeros(2, 3, dtype=torch.float64)
    assert place_rewards([5.0, [1.0, 2.0]], mask, like).tolist() == [[0, 0, 5], [1, 2, 0]]
    assert place_rewards([[1.0, 2.0], 5.0], mask, like).tolist() == [[1, 0, 2], [0, 5, 0]]
    assert place_rewards(tensor([5.0, 6.0]), mask, like).tolist() == [[0, 0, 5], [0, 6, 0]]
    assert place_rewards(tensor([REWARDS, REWARDS]), mask, like).tolist() == [[0, 0, 1], [0, 0, 0]]
    assert pairs.select(torch.tensor([0])).mask.tolist() == [[True, False, True]]


# --- one lambda for the policy, one for the values; by length; cut responses
# ----------------------------------------------------------------------------------------------------------


def test_worked_numbers_of_the_critic_methods():
    """VC-PPO, VAPO and bootstrapping on r = (0, 0, 1), V = (.5, .6, .8), gamma 1."""
    decoupled = estimate("gae", outcome(REWARDS, VALUES), 1.0, 0.95, value_lam=1.0)
    assert decoupled.advantages[0].tolist() == near([0.4705, 0.39, 0.2])
    assert decoupled.targets[0].tolist() == near([1.0, 1.0, 1.0])
    for alpha, expected in ((1.5, [0.37654321, 0.35555556, 0.2]), (0.05, [0.1, 0.2, 0.2])):
        adaptive = estimate("gae", outcome(REWARDS, VALUES), 1.0, 0.95, lam_alpha=alpha)
        assert adaptive.advantages[0].tolist() == pytest.approx(expected, abs=1e-6)  # lambda is float32
    terminal = estimate("gae", outcome([0.0] * 3, VALUES), 1.0, 0.95)
    assert terminal.advantages[0].tolist() == near([-0.432, -0.56, -0.8])
    cut = estimate("gae", outcome([0.0] * 3, VALUES, after=0.9), 1.0, 0.95, value_lam=1.0)
    assert cut.advantages[0].tolist() == near([0.38025, 0.295, 0.1])
    assert cut.targets[0].tolist() == near([0.9, 0.9, 0.9])


@sweep
@given(
    rows=st.lists(st.lists(st.tuples(number(), number()), min_size=1, max_size=6), min_size=1, max_size=4),
    alpha=st.sampled_from([0.05, 0.4, 1.5, 100.0]),
    data=st.data(),
)
def test_adaptive_lambda_and_bootstrapping_of_ragged_rows(rows, alpha, data):
    gamma, width = 0.9, max(map(len, rows))
    after = [data.draw(st.sampled_from([0.0, 0.7, -1.3])) for _ in rows]
    full = [row + [(77.0, -99.0)] * (width - len(row)) for row in rows]
    rewards, values = (tensor([[cell[i] for cell in row] for row in full]) for i in (0, 1))
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows]).unsqueeze(1)
    given_ = Outcome(rewards, torch.zeros_like(rewards), mask, values, tensor(after))
    found = estimate("gae", given_, gamma, 0.123, lam_alpha=alpha)
    for i, row in enumerate(rows):
        own = oracles.bootstrapped([cell[0] for cell in row], gamma, after[i])
        deltas = oracles.td_errors(own, [cell[1] for cell in row], gamma)
        lam = oracles.adaptive_lambda(len(row), alpha)
        expected = oracles.gae_double_sum(deltas, gamma, lam)
        assert found.advantages[i][mask[i]].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


# --- groups
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [1.0, -0.5, -0.5]),
        ("dr_grpo", [0.6667, -0.3333, -0.3333]),
        ("grpo", [1.1547, -0.57735, -0.57735]),
        ("reinforce_plus_plus", [1.0, 0.0, 0.0]),
        ("reinforce_plus_plus_baseline", [0.6667, -0.3333, -0.3333]),
    ],
)
def test_worked_numbers_of_the_group_methods(name, expected):
    found = estimate(name, group_outcome([[1.0, 0.0, 0.0]], [3, 1, 2]), 0.99, 0.95)
    assert found.targets is None
    assert found.advantages[:, 0].tolist() == pytest.approx(expected, abs=3e-4)  # eps 1e-4 in the std
    assert found.advantages[0].tolist() == near([float(found.advantages[0, 0])] * 3)  # no discount


@pytest.mark.parametrize("name", oracles.CENTRED_SCORES)
@short_sweep
@given(
    groups=st.lists(st.lists(number(), min_size=1, max_size=5), min_size=1, max_size=4),
    kl=st.sampled_from([0.0, 0.3]),
    data=st.data(),
)
def test_group_estimators(name, groups, kl, data):
    """KL is charged from a token on; neither padding nor the order of responses plays a part."""
    count = sum(map(len, groups))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    given_ = group_outcome(groups, lengths, kl)
    centred = [number for group in groups for number in oracles.CENTRED_SCORES[name](group)]
    advantages = estimate(name, given_, 0.5, 0.5).advantages
    for i, length in enumerate(lengths):
        expected = oracles.less_kl_to_go(centred[i], [kl] * length)
        assert advantages[i, :length].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert not advantages[i, length:].any()
    order = torch.tensor(data.draw(st.permutations(range(count))))
    shuffled = Outcome(
        given_.scores[order], given_.kl_cost[order], given_.mask[order], groups=given_.groups[order]
    )
    torch.testing.assert_close(estimate(name, shuffled, 0.5, 0.5).advantages, advantages[order])


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_equal_groups_and_groups_of_one_are_exactly_0(name):
    """float32 0.97 eight times has a mean that is not 0.97; an offset of the KL must not change that."""
    scores = torch.full((9, 1), 0.97, dtype=torch.float32)
    scores[8] = 5.0
    groups = torch.tensor([0] * 8 + [1])
    flat = Outcome(scores, torch.zeros_like(scores), torch.ones(9, 1, dtype=torch.bool), groups=groups)
    assert not estimate(name, flat, 1.0, 1.0).advantages.any()
    assert group_scores(flat).equal.tolist() == [True] * 9
    nearly = Outcome(scores + 1e-7 * torch.arange(9).unsqueeze(1), flat.kl_cost, flat.mask, groups=groups)
    assert not estimate(name, nearly, 1.0, 1.0).advantages.any()
    large = Outcome(1000 * nearly.scores, flat.kl_cost, flat.mask, groups=groups)  # 0.97 in another unit
    assert not estimate(name, large, 1.0, 1.0).advantages.any()
    apart = Outcome(1000 + 0.01 * torch.arange(9.0).unsqueeze(1), flat.kl_cost, flat.mask, groups=groups)
    assert estimate(name, apart, 1.0, 1.0).advantages[:8].all()


def test_grpo_uses_bessels_correction():
    """The biased std would give 1.4142 and -0.7071."""
    advantages = estimate("grpo", group_outcome([[1.0, 0.0, 0.0]]), 1.0, 1.0).advantages
    std = math.sqrt((0.6667**2 + 2 * 0.3333**2) / 2)
    assert advantages[0, 0] == pytest.approx(0.6667 / (std + 1e-4), abs=1e-3)
    assert advantages[0, 0] < 1.2


def test_the_settings_name_every_estimator():
    from typing import get_args, get_type_hints

    from proxima.config import PPOConfig

    assert set(get_args(get_type_hints(PPOConfig)["adv_estimator"])) == set(ESTIMATORS)
