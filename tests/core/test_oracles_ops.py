"""Masked means and whitening against the oracles; padding and micro-batches change neither."""

import math

import numpy
import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

from proxima.core.ops import exact_kl, masked_mean, place_rewards, whiten
from tests import oracles
from tests.formula_cases import batches, flat, near, padded, ragged, sweep


@sweep
@given(batch=batches("x"))
def test_masked_mean_and_whitening_see_real_tokens_only(batch):
    real_tokens = flat(ragged(batch, "x"))
    x, mask = padded(ragged(batch, "x"))
    mean = oracles.masked_mean(x.flatten().tolist(), mask.flatten().tolist())
    assert masked_mean(x, mask).item() == near(mean)
    assert masked_mean(x, mask, total=7).item() == near(mean * len(real_tokens) / 7)
    white = whiten(x, mask)
    assert white.isfinite().all()
    assert white[mask].tolist() == near(oracles.whiten(real_tokens))


def test_whitening_centres_over_the_whole_batch():
    """Not by row, and the mean is not added back (torchtune's defect); the variance is the biased one."""
    x, mask = padded([[5.0, 9.0], [6.0, 7.0, 30.0], [8.0]])
    white = whiten(x, mask)[mask]
    assert white.mean().item() == near(0.0)
    assert white.square().mean().item() == near(1.0)
    assert abs(white[:2].mean().item()) > 0.1  # the rows keep their differences


def test_whitening_of_equal_advantages_is_zero():
    x, mask = padded([[2.0, 2.0], [2.0]])
    assert whiten(x, mask)[mask].tolist() == near([0.0] * 3)


def test_whitening_does_not_cancel_around_a_large_mean():
    """A variance taken as mean(x^2) - mean(x)^2 loses 12 of 16 digits here."""
    near_zero = [[0.3, -1.1, 2.2], [3.7]]
    far_away = [[number + 1e6 for number in row] for row in near_zero]
    white = whiten(*padded(far_away))[padded(far_away)[1]]
    assert white.tolist() == pytest.approx(oracles.whiten(flat(near_zero)), abs=1e-7)


@sweep
@given(batch=batches("x"))
def test_micro_batches_add_up_to_the_mean_of_the_whole(batch):
    x, mask = padded(ragged(batch, "x"))
    parts = [masked_mean(x[i : i + 1], mask[i : i + 1], total=mask.sum()) for i in range(len(batch))]
    assert torch.stack(parts).sum().item() == near(masked_mean(x, mask).item())


def test_mean_of_micro_batch_means_is_not_the_mean():
    """TRL's defect: a short sequence's tokens would weigh more than a long one's."""
    x, mask = padded([[1.0], [0.0, 0.0, 0.0]])
    assert masked_mean(x, mask).item() == near(0.25)
    assert torch.stack([masked_mean(x[:1], mask[:1]), masked_mean(x[1:], mask[1:])]).mean().item() == near(
        0.5
    )


def test_the_mean_of_packed_tokens_is_that_of_the_same_tokens_under_a_mask():
    x, mask = padded([[5.0, 9.0], [6.0, 7.0, 30.0], [8.0]])
    for total in (None, 7):
        assert masked_mean(x[mask], None, total).item() == near(masked_mean(x, mask, total).item())


def test_exact_kl_of_two_coins():
    """KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 log(3/2) + 1/4 log(1/2)."""
    policy, reference = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert exact_kl(policy, reference).item() == pytest.approx(expected, rel=1e-6)
    assert exact_kl(policy, policy).item() == 0


MASK = torch.tensor([[True, True, False], [True, True, True]])


@pytest.mark.parametrize(
    ("rewards", "placed"),
    [
        ([1.0, 2.0], [[0, 1, 0], [0, 0, 2]]),
        (torch.tensor([1.0, 2.0]), [[0, 1, 0], [0, 0, 2]]),
        (numpy.array([1.0, 2.0]), [[0, 1, 0], [0, 0, 2]]),
        ([[1.0, 2.0], [3.0, 4.0, 5.0]], [[1, 2, 0], [3, 4, 5]]),
        ([7.0, [3.0, 4.0, 5.0]], [[0, 7, 0], [3, 4, 5]]),
        (torch.tensor([[1.0, 2.0, torch.nan], [3.0, 4.0, 5.0]]), [[1, 2, 0], [3, 4, 5]]),
        (torch.tensor([[1.0, 2.0, 9.0, 9.0], [3.0, 4.0, 5.0, 9.0]]), [[1, 2, 0], [3, 4, 5]]),
    ],
)
def test_rewards_are_placed_on_real_tokens(rewards, placed):
    assert place_rewards(rewards, MASK, torch.zeros(2, 3)).tolist() == placed


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0], "1 rewards for 2 sequences; give one per sequence"),
        ([[1.0], [1.0, 2.0, 3.0]], "sequence 0 has 2 tokens but 1 rewards; give one per token"),
        (torch.zeros(2, 2), "sequence 1 has 3 tokens but 2 rewards; give one per token"),
        (torch.tensor([1.0, torch.nan]), "reward 1 is not finite"),
        ([[1.0, torch.inf], [1.0, 2.0, 3.0]], "reward 0 is not finite"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        place_rewards(rewards, MASK, torch.zeros(2, 3))


def test_a_sequence_without_tokens_cannot_be_rewarded():
    with pytest.raises(ValueError, match="sequence 1 has no tokens to reward"):
        place_rewards([1.0, 2.0], torch.tensor([[True], [False]]), torch.zeros(2, 1))


class CountingMode(TorchDispatchMode):
    """Counts the operations that reach the device."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", ["one per sequence", "per token"])
def test_placing_rewards_takes_as_many_device_operations_for_many_sequences_as_for_two(shape):
    def operations(count):
        mask = torch.ones(count, 3, dtype=torch.bool)
        rewards = torch.ones(count) if shape == "one per sequence" else torch.ones(count, 3)
        with CountingMode() as mode:
            place_rewards(rewards, mask, torch.zeros(count, 3))
        return mode.calls

    assert operations(50) == operations(2)
