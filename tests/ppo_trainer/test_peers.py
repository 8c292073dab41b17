"""Defects found in other PPO trainers, as tests of this one."""

import pytest
import torch

from proxima.core.ops import masked_mean, whiten
from proxima.ppo_trainer import PPOTrainer
from tests.helpers import LOGPROB_ROUNDING, shake

LENGTHS = [f"prompt {i}" for i in range(6)]


def test_more_minibatches_are_more_optimiser_steps(make_config):
    """TRL: num_mini_batches does not change the number of optimiser steps."""
    steps = {}
    for size in (6, 3, 2):
        trainer = PPOTrainer(make_config(minibatch_size=size, ppo_epochs=2))
        count = 0

        def counted(*arguments, original=trainer.model_trainer.policy_optimizer.step):
            nonlocal count
            count += 1
            return original(*arguments)

        trainer.model_trainer.policy_optimizer.step = counted
        assert trainer.ppo_step(LENGTHS)["optimizer_steps"] == count
        steps[size] = count
    assert steps == {6: 2, 3: 4, 2: 6}


@pytest.mark.parametrize("role", ["policy", "value"])
def test_a_minibatch_loss_is_a_mean_over_its_tokens_not_a_mean_of_micro_batch_means(make_config, role):
    """TRL (policy and value), verl (value): with ragged lengths the two differ; here cutting must not
    matter."""
    losses, norms = [], []
    for micro in (6, 1):
        trainer = shake(
            PPOTrainer(
                make_config(max_new_tokens=12, temperature=4.0, top_k=0, top_p=1.0, micro_batch_size=micro)
            )
        )
        pairs = ragged(trainer)
        assert len(set(pairs.lengths.tolist())) > 1
        stats = trainer.model_trainer._minibatch(pairs)
        losses.append(float(stats[f"{role}_loss"]))
        norms.append(float(stats[f"grad_norm_{role}"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def ragged(trainer):
    """A rollout of different lengths with made-up advantages and returns that differ by sequence."""
    pairs, _ = trainer.generator.generate_sequences([f"prompt {i}" for i in range(40)])
    ended = pairs.tokens.ended.nonzero().flatten()[:3]
    cut = (~pairs.tokens.ended).nonzero().flatten()[:3]
    pairs = pairs.select(torch.cat([ended, cut]))
    numbers = torch.randn(pairs.mask.shape, generator=torch.Generator().manual_seed(2))
    numbers = numbers + torch.arange(len(numbers)).unsqueeze(1)
    return pairs.with_columns(advantage=numbers, value=torch.zeros_like(numbers), **{"return": numbers})


def test_statistics_do_not_average_over_padding(make_config):
    """TRL: approximate KL, entropy and ratio average over padding.

    A rollout padded further must measure the same.
    """
    trainer = shake(PPOTrainer(make_config(max_new_tokens=12, temperature=4.0, top_k=0, top_p=1.0)))
    pairs = ragged(trainer)
    pairs = pairs.with_columns(
        logprob_policy=pairs.column("logprob_policy") + 0.3
    )  # so that the ratio is not 1
    sums, peaks = trainer.model_trainer._policy_backward(pairs)
    narrow = sums | peaks
    ratio = torch.exp(torch.tensor(-0.3))
    assert float(narrow["approx_kl"]) == pytest.approx(float(ratio - 1 + 0.3), rel=1e-3)
    assert float(narrow["ratio_max"]) == pytest.approx(
        float(ratio), rel=1e-3
    )  # padding would show a ratio of 1
    down = pairs.column("advantage")[pairs.mask] < 0
    assert float(narrow["clip_fraction"]) == pytest.approx(float(down.float().mean()), rel=1e-5)


def test_means_of_an_update_do_not_shrink_with_the_number_of_minibatches(make_config):
    """TRL divides its means by places that it never fills: with 8 minibatches an unchanged policy has a
    mean ratio of 1/8."""
    losses = {}
    for size in (6, 1):
        frozen = make_config(
            minibatch_size=size, ppo_epochs=2, learning_rate=1e-300, value_learning_rate=1e-300
        )
        losses[size] = PPOTrainer(frozen).ppo_step(LENGTHS)["value_loss"]
    assert losses[1] == pytest.approx(
        losses[6], rel=0.3
    )  # a mean over tokens, or over sequences: not a sixth of it


def test_whitened_advantages_are_centred_over_the_whole_rollout(make_config):
    """torchtune adds the mean back; TRL whitens each rank by itself."""
    pairs = PPOTrainer(make_config(minibatch_size=2)).ppo_step(LENGTHS)["sa_pairs"]
    advantages, mask = pairs.column("advantage"), pairs.mask
    assert float(masked_mean(advantages, mask)) == pytest.approx(0, abs=1e-5)
    assert float(masked_mean(advantages**2, mask)) == pytest.approx(1, abs=1e-3)
    shifted = whiten(torch.full((2, 2), 7.0), torch.ones(2, 2, dtype=torch.bool))
    assert torch.equal(shifted, torch.zeros(2, 2))


def test_returns_are_taken_before_advantages_are_whitened(make_config, prompts):
    pairs = PPOTrainer(make_config(value_target="lambda_return", value_learning_rate=1e-300)).ppo_step(
        prompts
    )["sa_pairs"]
    raw = pairs.column("return") - pairs.column("value")
    assert float(masked_mean(raw**2, pairs.mask)) != pytest.approx(1, abs=0.05)
    assert torch.allclose(whiten(raw, pairs.mask), pairs.column("advantage"), atol=1e-4)


def test_a_failing_reward_is_neither_zero_nor_none(make_config, prompts):
    """OpenRLHF logs it at info level and goes on with None."""

    def sometimes(prompts, texts):
        return [float("nan") if prompt == "x" else 2.0 for prompt in prompts]

    results = PPOTrainer(make_config(rewards=sometimes)).ppo_step(prompts)
    assert results["avg_reward"] == 2.0
    assert results["failed_rewards"] == 1
    assert results["rewards"][3] != results["rewards"][3]
    assert results["sa_pairs"].batch_size == 3


def test_the_temperature_divides_old_new_and_reference_logits_alike(make_config, prompts):
    results = PPOTrainer(make_config(temperature=0.5, top_k=0, top_p=1.0)).ppo_step(prompts)
    assert results["kl"] == pytest.approx(0, abs=6 * LOGPROB_ROUNDING)  # a sum over tokens
    assert results["first_ratio_error"] < LOGPROB_ROUNDING
