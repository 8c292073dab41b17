"""Learning rates by rule: what the model's size decides, and where the user's word stays."""

import logging

import pytest
from transformers import AutoModelForCausalLM

from proxima.base_setup import fill_learning_rates
from proxima.config import PPOConfig
from proxima.ppo_trainer import PPOTrainer


def filled(parameters, **settings):
    config = PPOConfig(**({"learning_rate": 0.0, "value_learning_rate": 0.0} | settings))
    fill_learning_rates(config, parameters)
    return config.learning_rate, config.value_learning_rate


def test_small_models_take_larger_steps_and_all_weights_smaller_ones():
    assert filled(600_000_000) == (5e-5, 1e-4)
    assert filled(600_000_000, lora_r=0) == (1e-6, 1e-5)
    assert filled(1_000_000) == pytest.approx((9e-4, 1.8e-3), rel=0.05)
    assert filled(10**12) == (1e-5, 2e-5)
    sizes = [10**power for power in range(5, 13)]
    rates = [filled(size) for size in sizes]
    assert rates == sorted(rates, reverse=True)
    assert all(policy < value for policy, value in rates)


def test_what_is_given_stays():
    assert filled(1_000_000, learning_rate=3e-4)[0] == 3e-4
    assert filled(1_000_000, value_learning_rate=3e-4)[1] == 3e-4
    unset = PPOConfig()
    fill_learning_rates(unset, 1_000_000)
    assert unset == PPOConfig()


def test_a_method_without_a_value_model_has_no_rate_for_it():
    config = PPOConfig.from_preset("grpo")
    fill_learning_rates(config, 600_000_000)
    assert (config.learning_rate, config.value_learning_rate) == (5e-5, PPOConfig().value_learning_rate)


def test_a_trainer_by_a_preset_has_the_rates_in_its_settings_and_its_optimisers(tiny, caplog):
    with caplog.at_level(logging.INFO):
        trainer = PPOTrainer(PPOConfig.from_preset("stable", model_name=tiny, device="cpu"))
    rates = trainer.config.learning_rate, trainer.config.value_learning_rate
    parameters = AutoModelForCausalLM.from_pretrained(tiny).num_parameters()
    assert rates == filled(parameters) > (0, 0)
    optimizers = trainer.model_trainer.policy_optimizer, trainer.model_trainer.value_optimizer
    assert tuple(each.param_groups[0]["lr"] for each in optimizers) == rates
    assert f"learning_rate {rates[0]:g}" in caplog.text
