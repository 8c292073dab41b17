"""The gradient of each way to hold the policy near the reference, against exact enumeration of all responses
of two tokens over a vocabulary of four."""

import pytest
import torch

from proxima.advantage import Outcome, estimate
from proxima.core.ops import exact_kl
from proxima.training import Moved, kl_loss, policy_objective, policy_ratio

WORDS = 4
SEQUENCES = [(first, second) for first in range(WORDS) for second in range(WORDS)]


def tables(seed, count=3):
    """Logits of the first token (row 0) and of the second after each first one, (1 + V, V), `count` times."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1 + WORDS, WORDS, generator=generator, dtype=torch.float64) for _ in range(count)]


def logprobs(table):
    """(V * V, 2), of both tokens of every response."""
    table = torch.log_softmax(table, 1)
    return torch.stack([torch.stack([table[0, a], table[1 + a, b]]) for a, b in SEQUENCES])


def gradient(loss, table):
    return torch.autograd.grad(loss, table)[0]


def true_gradients(policy, reference):
    """Of the KL of whole responses; and of the KL of each state, states visited as they are."""
    new, ref = torch.log_softmax(policy, 1), torch.log_softmax(reference, 1)
    states = exact_kl(new, ref)  # (1 + V,)
    visits = torch.cat([torch.ones(1, dtype=torch.float64), new[0].exp()])
    whole = gradient((visits * states).sum(), policy)
    new = torch.log_softmax(policy, 1)
    return whole, gradient((visits.detach() * exact_kl(new, ref)).sum(), policy)


def reward_gradient(policy, reference, cost):
    """Of the loss whose advantages have this cost (V * V, 2) in the reward, in expectation over responses."""
    new = logprobs(policy)
    chances = new.detach().sum(1).exp()
    mask = torch.ones(new.shape, dtype=torch.bool)
    outcome = Outcome(torch.zeros_like(new).detach(), cost, mask)
    advantages = estimate("reinforce_plus_plus", outcome, 1.0, 1.0).advantages
    losses, _ = policy_objective("ppo", Moved(new, new.detach(), advantages), 0.2, 0.2)
    return gradient((chances.unsqueeze(1) * losses).sum(), policy)


def loss_gradient(name, policy, old, reference):
    """Of a KL loss in expectation over the responses of the policy that sampled."""
    new, before = logprobs(policy), logprobs(old).detach()
    losses = kl_loss(name, new, logprobs(reference), policy_ratio(new, before))
    return gradient((before.sum(1).exp().unsqueeze(1) * losses).sum(), policy)


@pytest.mark.parametrize("seed", range(3))
def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_whole_responses(seed):
    policy, reference, _ = tables(seed)
    policy.requires_grad_()
    whole, by_state = true_gradients(policy, reference)
    k1 = (logprobs(policy) - logprobs(reference)).detach()
    torch.testing.assert_close(reward_gradient(policy, reference, k1), whole)
    assert (whole - by_state).abs().max() > 0.01  # a loss knows nothing of the states that follow


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["k2", "k3"])
def test_a_kl_loss_has_the_gradient_of_the_kl_of_each_state(name, seed):
    policy, reference, _ = tables(seed)
    policy.requires_grad_()
    torch.testing.assert_close(
        loss_gradient(name, policy, policy, reference), true_gradients(policy, reference)[1]
    )


@pytest.mark.parametrize("seed", range(3))
def test_once_the_policy_has_moved_k3_times_the_ratio_keeps_that_gradient_and_k2_does_not(seed):
    """The states are those that the old policy visits."""
    policy, reference, old = tables(seed)
    policy.requires_grad_()
    visits = torch.cat([torch.ones(1, dtype=torch.float64), torch.softmax(old[0], 0)])
    states = exact_kl(torch.log_softmax(policy, 1), torch.log_softmax(reference, 1))
    expected = gradient((visits * states).sum(), policy)
    # the ratio of a token corrects for its own state; the state's chance stays the old policy's
    torch.testing.assert_close(loss_gradient("k3", policy, old, reference), expected)
    assert (loss_gradient("k2", policy, old, reference) - expected).abs().max() > 0.01


def test_k3_in_the_reward_may_point_away_from_the_reference():
    """Where no setting puts it: p = (.7, .3), reference (.5, .5)."""
    policy = torch.tensor([[0.7, 0.3]], dtype=torch.float64).log().requires_grad_()
    new, ref = torch.log_softmax(policy, 1)[0], torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    k1 = (new - ref).detach()
    for cost, expected in ((k1, 0.17793), ((-k1).exp() - 1 + k1, -0.02207)):
        found = gradient((new.detach().exp() * cost * new).sum(), policy)
        assert float(found[0, 0]) == pytest.approx(expected, abs=1e-5)
        new = torch.log_softmax(policy, 1)[0]
