"""Objectives, importance corrections and token weights against the oracles and worked numbers."""

import math
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from proxima.config import PPOConfig
from proxima.training import (
    Moved,
    clipped,
    correction,
    kl_loss,
    policy_loss,
    policy_objective,
    policy_ratio,
    token_weights,
)
from proxima.training.importance import CORRECTIONS
from proxima.training.kl_loss import KL_LOSSES
from proxima.training.objectives import OBJECTIVES
from proxima.training.token_weights import WEIGHTINGS
from tests import oracles
from tests.formula_cases import near, number, sweep


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def slopes(name, new, old, advantage, low, high, sampled=None):
    """d loss / d logprob, and the loss."""
    logprobs = tensor(new).log().requires_grad_()
    advantages = torch.full_like(logprobs, advantage)
    moved = Moved(logprobs, tensor(old).log(), advantages, None if sampled is None else tensor(sampled).log())
    loss, stopped = policy_objective(name, moved, low, high)
    return torch.autograd.grad(loss.sum(), logprobs)[0].tolist(), loss.tolist(), stopped.tolist()


@pytest.mark.parametrize(
    ("name", "low", "high", "good", "bad"),
    [
        ("ppo", 0.2, 0.2, [-0.6, -1, 0], [0, 1, 1.4]),
        ("ppo", 0.2, 0.28, [-0.6, -1, 0], [0, 1, 1.4]),
        ("cispo", 0.2, 0.28, [-0.6, -1, -1.28], [0.6, 1, 1.28]),
        ("dis", 0.3, 5.0, [0, -1, -1.4], [0, 1, 1.4]),
    ],
)
def test_worked_slopes(name, low, high, good, bad):
    """Old probability .5, new .3, .5 and .7."""
    for advantage, expected in ((1.0, good), (-1.0, bad)):
        found, loss, _ = slopes(name, [0.3, 0.5, 0.7], [0.5] * 3, advantage, low, high)
        assert found == near(expected)
        if name == "ppo" and advantage > 0:
            assert loss[2] == near(-(1 + high))


@sweep
@given(ratio=number(0.1, 5), advantage=number(-3, 3), low=number(0.05, 0.4), high=number(0.05, 3))
def test_slopes(ratio, advantage, low, high):
    assume(all(abs(ratio - kink) > 1e-6 for kink in (1 - low, 1 + high)) and abs(advantage) > 1e-6)
    old, new = 0.1, 0.1 * ratio
    assert slopes("cispo", [new], [old], advantage, low, high)[0] == near(
        [oracles.cispo_gradient(ratio, advantage, high)]
    )
    found, _, stopped = slopes("dis", [new], [old], advantage, low, high)
    assert found == near([oracles.dis_gradient(ratio, advantage, low, high)])
    assert stopped == [not 1 - low < ratio < 1 + high]
    found, loss, stopped = slopes("ppo", [new], [old], advantage, low, high)
    too_far = ratio > 1 + high if advantage > 0 else ratio < 1 - low
    assert (found, stopped) == ([0.0] if too_far else near([-ratio * advantage]), [too_far])
    held = oracles.clip(ratio, 1 - low, 1 + high)
    assert loss == near([-min(ratio * advantage, held * advantage)])


def test_ppo_with_a_wider_band_gradcheck():
    old, advantages = tensor([-1.0] * 6), tensor([1.3, -0.7, 2.0, -1.1, 0.9, -1.7])
    new = (old + tensor([-1.0, -0.4, 0.1, 0.2, 0.27, 0.6])).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: policy_objective("ppo", Moved(x, old, advantages), 0.2, 0.4)[0], new
    )


def test_an_unchanged_policy_has_the_plain_policy_gradient_with_every_objective():
    for name in OBJECTIVES:
        assert slopes(name, [0.2, 0.9], [0.2, 0.9], 1.5, 0.2, 0.2)[0] == near([-1.5, -1.5])


def test_dis_takes_its_ratio_to_the_policy_that_sampled():
    assert slopes("dis", [0.5], [0.5], 1.0, 0.3, 5.0, sampled=[0.25])[0] == near([-2.0])
    assert slopes("dis", [0.5], [0.5], 1.0, 0.3, 5.0, sampled=[0.9])[0] == [0.0]
    assert slopes("ppo", [0.5], [0.5], 1.0, 0.3, 5.0, sampled=[0.25])[0] == near([-1.0])


def test_without_an_upper_end_of_its_own_the_band_is_the_same_on_both_sides():
    ratio, advantages = tensor([0.5, 1.1, 1.25, 2.0]), tensor([-1.0, 1.0, 1.0, 1.0])
    assert torch.equal(policy_loss(ratio, advantages, 0.2), policy_loss(ratio, advantages, 0.2, 0.0, 0.2))
    assert clipped(ratio, advantages, 0.2).tolist() == [True, False, True, True]
    assert clipped(ratio, advantages, 0.2, 0.3).tolist() == [True, False, False, True]


def test_a_gradient_that_dual_clipping_stops_counts_as_stopped():
    new = tensor([0.1, 0.6, 0.9]).log().requires_grad_()  # ratios of 0.5, 3 and 4.5
    moved = Moved(new, tensor([0.2, 0.2, 0.2]).log(), tensor([-1.0, -1.0, -1.0]))
    for dual, expected in ((0.0, [True, False, False]), (4.0, [True, False, True])):
        loss, stopped = policy_objective("ppo", moved, 0.2, 0.2, dual)
        assert stopped.tolist() == expected
        assert (torch.autograd.grad(loss.sum(), new)[0] == 0).tolist() == expected


# --- KL as a loss
# ----------------------------------------------------------------------------------------------------------


def test_worked_kl_gradients():
    """p = (.7, .3), reference (.5, .5): k3 in the reward has the wrong sign, and so no setting puts it there."""
    expected = {
        "true": 0.17793, "k1 reward": 0.17793, "k2 loss": 0.17793, "k3 ratio loss": 0.17793,
        "k1 loss": 0.0, "k3 loss": 0.2, "k3 reward": -0.02207,
    }  # fmt: skip
    assert oracles.expected_kl_gradients(0.7, 0.5) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", KL_LOSSES)
def test_the_expected_gradient_of_a_kl_loss_is_that_of_the_true_kl(name):
    """Over both tokens of a distribution, weighted by their chances under the policy that sampled."""
    for p, ref in ((0.7, 0.5), (0.2, 0.9)):
        logit = tensor([math.log(p / (1 - p)), 0.0]).requires_grad_()
        new = torch.log_softmax(logit, 0)
        losses = kl_loss(name, new, tensor([ref, 1 - ref]).log(), policy_ratio(new, new.detach()))
        (new.detach().exp() * losses).sum().backward()
        assert float(logit.grad[0]) == near(oracles.expected_kl_gradients(p, ref)["true"])


def test_k3_keeps_the_true_gradient_when_the_policy_has_moved():
    logit = tensor([0.4, 0.0]).requires_grad_()
    new, old, ref = torch.log_softmax(logit, 0), tensor([0.3, 0.7]).log(), tensor([0.5, 0.5]).log()
    (old.exp() * kl_loss("k3", new, ref, policy_ratio(new, old))).sum().backward()
    assert float(logit.grad[0]) == near(oracles.expected_kl_gradients(float(new[0].exp()), 0.5)["true"])


@sweep
@given(new=number(-4, -0.01), ref=number(-4, -0.01), old=number(-4, -0.01))
def test_kl_loss_slopes(new, ref, old):
    for name in KL_LOSSES:
        logprob = tensor([new]).requires_grad_()
        ratio = policy_ratio(logprob, tensor([old]))
        loss = kl_loss(name, logprob, tensor([ref]), ratio)
        assert float(loss.detach()) >= -1e-12  # rounding of two equal numbers
        expected = oracles.kl_loss_gradient(name, new, ref, math.exp(new - old))
        assert torch.autograd.grad(loss.sum(), logprob)[0].tolist() == near([expected])


# --- corrections
# ----------------------------------------------------------------------------------------------------------


def corrected(mode, weights, low, high):
    old = tensor(weights).log()
    weight, cut = correction(mode, old, torch.zeros_like(old), torch.ones_like(old).bool(), low, high)
    return weight.tolist(), cut.tolist()


def test_worked_corrections():
    """w = (.4, 1, 6)."""
    assert corrected("truncate", [[0.4, 1.0, 6.0]], 0.5, 2.0) == (
        [near([0.4, 1.0, 2.0])],
        [[False, False, True]],
    )
    assert corrected("mask", [[0.4, 1.0, 6.0]], 0.5, 5.0) == ([near([0, 1, 0])], [[True, False, True]])
    assert oracles.geometric_mean([0.4, 1.0, 6.0]) == pytest.approx(1.339, abs=1e-3)
    for low, high, kept in ((0.99, 1.01, 0.0), (0.999, 1.001, 0.0), (0.5, 1.5, 1.0)):
        assert corrected("sequence_mask", [[0.4, 1.0, 6.0]], low, high)[0] == [[kept] * 3]


@sweep
@given(
    rows=st.lists(st.lists(number(0.05, 8), min_size=1, max_size=5), min_size=1, max_size=4),
    low=st.sampled_from([0.3, 0.9]),
    high=st.sampled_from([1.1, 3.0]),
)
def test_corrections_do_not_depend_on_padding(rows, low, high):
    width = max(map(len, rows))
    assume(all(abs(oracles.geometric_mean(row) - end) > 1e-9 for row in rows for end in (low, high)))
    assume(all(abs(x - end) > 1e-9 for row in rows for x in row for end in (low, high)))
    old = tensor([[math.log(x) for x in row] + [50.0] * (width - len(row)) for row in rows])
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows]).unsqueeze(1)
    for mode in CORRECTIONS:
        weight, cut = correction(mode, old, torch.zeros_like(old), mask, low, high)
        for i, row in enumerate(rows):
            if mode == "sequence_mask":
                expected = [float(low <= oracles.geometric_mean(row) <= high)] * len(row)
            else:
                rule = {
                    "truncate": lambda x: min(x, high),
                    "mask": lambda x: oracles.masked_weight(x, low, high),
                }
                expected = [rule[mode](x) for x in row]
            assert weight[i][mask[i]].tolist() == near(expected)
            assert cut[i][mask[i]].tolist() == [
                w == 0 or (mode == "truncate" and x > high) for w, x in zip(expected, row, strict=True)
            ]


# --- token weights
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "expected"), [("token", 2.0), ("sequence", 3.0), ("horizon", 1.0)])
def test_worked_weights(mode, expected):
    losses = [[1.0, 1.0, 1.0], [5.0]]
    assert oracles.weighted_loss(losses, mode, 4) == expected
    assert weighted(losses, mode, 4, size=2) == pytest.approx(expected, rel=1e-6)  # 1 / size in float32


def weighted(losses, mode, horizon, size):
    """The sum over micro-batches of `size` responses."""
    sizes = torch.tensor([len(row) for row in losses])
    weights = token_weights(mode, sizes, horizon)
    total = 0.0
    for start in range(0, len(losses), size):
        rows = losses[start : start + size]
        per_token = None
        if weights.rows is not None:
            per_token = torch.cat([weights.rows[start + i].expand(len(row)) for i, row in enumerate(rows)])
        total += float(weights.mean(tensor([x for row in rows for x in row]), per_token))
    return total


@pytest.mark.parametrize("mode", WEIGHTINGS)
@sweep
@given(
    losses=st.lists(st.lists(number(), min_size=1, max_size=5), min_size=1, max_size=5),
    size=st.integers(1, 5),
)
def test_weights_do_not_depend_on_micro_batches(mode, losses, size):
    expected = oracles.weighted_loss(losses, mode, 7)
    assert weighted(losses, mode, 7, size) == pytest.approx(
        expected, rel=1e-6, abs=1e-6
    )  # 1 / size in float32


def test_the_settings_name_every_method():
    hints = get_type_hints(PPOConfig)
    for setting, table in (
        ("objective", OBJECTIVES),
        ("importance_mode", CORRECTIONS),
        ("loss_weighting", WEIGHTINGS),
    ):
        assert set(get_args(hints[setting])) == set(table)
