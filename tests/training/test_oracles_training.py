"""Ratio, PPO-clip loss and value loss against the oracles, and their gradients."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from proxima.core.ops import masked_mean
from proxima.training import policy_loss, policy_ratio, value_loss
from tests import oracles
from tests.formula_cases import near, number, sweep

EPSILON = 0.2
DUAL_CLIPS = st.sampled_from([0.0, 1.5, 3.0])


def tensor(*rows, grad=False):
    return torch.tensor(rows, dtype=torch.float64, requires_grad=grad)


def table(low, high):
    """A (2, 3) tensor, as the losses must keep any shape."""
    row = st.lists(number(low, high), min_size=3, max_size=3)
    return st.lists(row, min_size=2, max_size=2).map(lambda rows: tensor(*rows))


def elementwise(oracle, *tensors):
    columns = zip(*(x.flatten().tolist() for x in tensors), strict=True)
    return torch.tensor([oracle(*xs) for xs in columns], dtype=torch.float64).view_as(tensors[0])


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# --- values
# ----------------------------------------------------------------------------------------------------------


@sweep
@given(new=table(-5, 0), old=table(-5, 0))
def test_ratio(new, old):
    assert_same(policy_ratio(new, old), elementwise(oracles.ratio, new, old))


@sweep
@given(ratio=table(0, 5), advantages=table(-3, 3), epsilon=number(0.05, 0.4), dual=DUAL_CLIPS)
def test_policy_loss(ratio, advantages, epsilon, dual):
    expected = elementwise(lambda r, a: oracles.policy_loss(r, a, epsilon, dual), ratio, advantages)
    assert_same(policy_loss(ratio, advantages, epsilon, dual_clip=dual), expected)


@sweep
@given(logprobs=table(-5, 0), advantages=table(-3, 3), dual=DUAL_CLIPS)
def test_an_unchanged_policy_has_ratio_1_loss_minus_advantage_and_the_plain_policy_gradient(
    logprobs, advantages, dual
):
    logprobs.requires_grad_()
    ratio = policy_ratio(logprobs, logprobs.detach())
    loss = policy_loss(ratio, advantages, EPSILON, dual_clip=dual)
    assert torch.equal(ratio, torch.ones_like(ratio))
    assert torch.equal(loss, -advantages)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert_same(gradient, -advantages)


@sweep
@given(values=table(-3, 3), returns=table(-3, 3), old=table(-3, 3), value_clip=number(0.05, 2))
def test_value_loss(values, returns, old, value_clip):
    plain = elementwise(oracles.value_loss, values, returns)
    clipped = elementwise(lambda v, r, o: oracles.value_loss(v, r, o, value_clip), values, returns, old)
    assert_same(value_loss(values, returns), plain)
    assert_same(value_loss(values, returns, old), plain)  # value_clip 0 is off, not "hold at the old value"
    assert_same(value_loss(values, returns, old_values=old, value_clip=value_clip), clipped)


# --- gradients
# -------------------------------------------------------------------------------------------------------

# Every branch of the clip on both signs of the advantage, each at least 0.05 from a kink (0.8, 1.2 and dual
# clip 3).
LOG_RATIOS = [[-1.0, -0.1, 0.0], [0.1, 0.5, 1.0], [1.3, -0.5, 0.05]]
ADVANTAGES = [[1.3, -0.7, 2.0], [-1.1, 0.9, -1.7], [-0.8, -1.4, 0.6]]


@pytest.mark.parametrize("dual", [0.0, 3.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_policy_loss_gradcheck(dual, sign):
    old, advantages = tensor([-1.0, -2.0, -0.5]), sign * tensor(*ADVANTAGES)
    logprobs = (old + tensor(*LOG_RATIOS)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(policy_ratio(x, old), advantages, EPSILON, dual_clip=dual), logprobs
    )


@sweep
@given(ratio=number(0.1, 5), advantage=number(-3, 3), dual=DUAL_CLIPS)
def test_policy_gradient_is_exactly_zero_where_clipped(ratio, advantage, dual):
    assume(
        all(abs(ratio - kink) > 1e-6 for kink in (1 - EPSILON, 1 + EPSILON, dual)) and abs(advantage) > 1e-6
    )
    logprobs, old = tensor([ratio]).log().requires_grad_(), tensor([0.0])
    loss = policy_loss(policy_ratio(logprobs, old), tensor([advantage]), EPSILON, dual_clip=dual)
    gradient = torch.autograd.grad(loss.sum(), logprobs)[0].item()
    expected = oracles.policy_loss_gradient(ratio, advantage, EPSILON, dual)
    assert gradient == (0.0 if expected == 0 else near(expected))


# Old value 0, clip 0.5: inside; beyond on either side, towards the target and away from it.
VALUES = [[0.2, -0.3, 0.9], [-0.9, 0.9, -0.9]]
RETURNS = [[1.0, 1.0, 2.0], [-2.0, 0.1, -0.1]]


@pytest.mark.parametrize("value_clip", [0.0, 0.5])
def test_value_loss_gradcheck(value_clip):
    values, returns, old = (
        tensor(*VALUES).requires_grad_(),
        tensor(*RETURNS),
        torch.zeros(2, 3, dtype=torch.float64),
    )
    assert torch.autograd.gradcheck(lambda x: value_loss(x, returns, old, value_clip), values)


def test_value_gradient_is_exactly_zero_where_clipped():
    values, returns = tensor(*VALUES).requires_grad_(), tensor(*RETURNS)
    loss = value_loss(values, returns, old_values=torch.zeros_like(returns), value_clip=0.5)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    held = torch.tensor(
        [[False, False, True], [True, False, False]]
    )  # beyond the clip and towards the target
    assert torch.equal(gradient[held], torch.zeros(2, dtype=torch.float64))
    assert_same(gradient[~held], 2 * (values - returns).detach()[~held])


def mean_losses(new, values, old, advantages, returns, mask, total=None):
    policy = masked_mean(policy_loss(policy_ratio(new, old), advantages, EPSILON), mask, total=total)
    return policy + masked_mean(value_loss(values, returns, old, 0.5), mask, total=total)


@pytest.fixture
def update():
    """Ragged (4, 5) inputs of one update, with large numbers in the padding, and the mask."""
    generator = torch.Generator().manual_seed(0)
    new, values, old, advantages, returns = torch.randn(
        5, 4, 5, dtype=torch.float64, generator=generator
    ).unbind()
    mask = torch.arange(5) < torch.tensor([[5], [1], [3], [2]])
    advantages, returns = advantages.masked_fill(~mask, 1e3), returns.masked_fill(~mask, -1e3)
    return new.requires_grad_(), values.requires_grad_(), old, advantages, returns, mask


def test_masked_tokens_have_exactly_zero_gradient(update):
    new, values, *_, mask = update
    for gradient in torch.autograd.grad(mean_losses(*update), (new, values)):
        assert torch.equal(gradient[~mask], torch.zeros_like(gradient[~mask]))
        assert gradient[mask].any()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_do_not_depend_on_the_micro_batch_size(update, size):
    """Both losses: peers normalise the critic's, or both, by micro-batch."""
    leaves, total = update[:2], update[-1].sum()
    whole = torch.autograd.grad(mean_losses(*update), leaves)
    parts = sum(mean_losses(*(x[i : i + size] for x in update), total=total) for i in range(0, 4, size))
    for gradient, expected in zip(torch.autograd.grad(parts, leaves), whole, strict=True):
        assert_same(gradient, expected)
