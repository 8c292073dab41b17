"""Masked means and whitening against the oracles; padding and micro-batches change neither."""

import pytest
import torch
from hypothesis import given

from proxima.core.ops import masked_mean, whiten
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
