"""Where nothing is set, the functions that settings choose among give the bits of PPO's own formulas."""

import pytest
import torch

from proxima.advantage import GAEAdvantage, Outcome, ReturnCalculator, TDError, estimate
from proxima.config import PPOConfig
from proxima.core.ops import masked_mean
from proxima.core.pairs import PlainPairs
from proxima.ppo_trainer import PPOTrainer
from proxima.training import (
    Moved,
    add_importance_weights,
    clipped,
    correction,
    policy_loss,
    policy_objective,
    policy_ratio,
    token_weights,
)
from proxima.training.importance import CORRECTIONS
from tests.helpers import shake

DEFAULT = PPOConfig()
LENGTHS = (7, 1, 4, 6)


@pytest.fixture
def drawn():
    """Columns (B, R) of responses of several lengths, in float32."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    columns = torch.randn(5, *mask.shape, generator=generator)
    return mask, *(torch.where(mask, column, 0.0) for column in columns)


def test_an_estimate_is_td_errors_then_gae_then_the_reward_to_go(drawn):
    mask, scores, kl, values, *_ = drawn
    gamma, lam = DEFAULT.gamma, DEFAULT.lam
    found = estimate("gae", Outcome(scores, kl, mask, values), gamma, lam, value_lam=DEFAULT.value_lam)
    pairs = PlainPairs(mask, {"reward": scores - kl, "value": values})
    errors = TDError().compute_td_errors(pairs, gamma)
    advantages = GAEAdvantage().compute_gae_advantages(errors, gamma, lam).column("advantage")
    targets = ReturnCalculator().add_reward_to_go(pairs, gamma).column("return")
    assert torch.equal(found.td_errors, errors.column("td_error"))
    assert torch.equal(found.advantages, advantages)
    assert torch.equal(found.targets, targets)
    for row, length in enumerate(LENGTHS):  # and these are the recursions, from the last token back
        after = advantage = target = torch.tensor(0.0)
        for place in reversed(range(length)):
            reward, value = (scores - kl)[row, place], values[row, place]
            advantage = (reward + gamma * after - value) + gamma * lam * advantage
            target, after = reward + gamma * target, value
            assert torch.equal(found.advantages[row, place], advantage)
            assert torch.equal(found.targets[row, place], target)


def test_the_objective_is_the_clipped_loss_and_so_is_its_gradient(drawn):
    _, new, old, advantages, *_ = drawn
    config, found = DEFAULT, []
    for objective in (config.objective, ""):
        logprobs = new.clone().requires_grad_()
        if objective:
            moved = Moved(logprobs, old, advantages)
            bands = (config.clip_epsilon, config.clip_epsilon_high, config.dual_clip)
            loss, stopped = policy_objective(objective, moved, *bands)
        else:
            ratio = policy_ratio(logprobs, old)
            loss = policy_loss(ratio, advantages, config.clip_epsilon)
            stopped = clipped(ratio, advantages, config.clip_epsilon)
        loss.sum().backward()
        found.append((loss.detach(), stopped, logprobs.grad))
    assert found[0][1].any()
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_tokens_are_weighted_as_the_mean_over_tokens(drawn):
    mask, losses, *_ = drawn
    sizes = torch.tensor(LENGTHS)
    weighting = token_weights(DEFAULT.loss_weighting, sizes, horizon=9)
    assert weighting.rows is None
    packed = losses[mask]
    assert torch.equal(weighting.mean(packed, None), masked_mean(packed, None))
    parts = [weighting.mean(part, None) for part in packed.split(3)]
    assert float(sum(parts)) == pytest.approx(float(masked_mean(losses, mask)), abs=1e-6)


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_where_no_other_engine_sampled_every_weight_is_exactly_1(drawn, mode):
    mask, old, *_ = drawn
    weights, cut = correction(mode, old, old, mask, DEFAULT.importance_low, DEFAULT.importance_clip)
    assert torch.equal(weights, torch.ones_like(old))
    assert not cut.any()


def test_a_step_without_correction_is_one_whose_weights_are_1(make_config, prompts):
    trainer = shake(PPOTrainer(make_config()))
    rollout, _ = trainer.generator.generate_sequences(prompts)
    assert rollout.tokens.sampled_logprobs is not None
    assert add_importance_weights(rollout, "truncate", 0.5, 2.0, is_old=False) == (rollout, 0.0)
    assert trainer.generator.add_importance_weights(rollout)[0] is rollout
    noise = torch.randn(rollout.mask.shape, generator=torch.Generator().manual_seed(3))
    pairs = rollout.with_columns(advantage=noise, value=noise, **{"return": noise})
    found = []
    for given in (pairs, pairs.with_columns(importance=torch.ones_like(noise))):
        losses, _ = trainer.model_trainer._policy_backward(given)
        gradients = [parameter.grad.clone() for parameter in trainer.models.policy.parameters()]
        found.append((torch.as_tensor(losses["policy_loss"]), *gradients))
    assert any(gradient.any() for gradient in found[0][1:])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))
