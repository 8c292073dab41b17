"""Any component can be replaced, by one that knows nothing but lists of dicts."""

import pytest
import torch

from proxima.advantage import ESTIMATORS, Credit
from proxima.evaluator.held_out import answer
from proxima.experience_buffer import ExperienceBuffer
from proxima.ppo_trainer import PPOTrainer
from tests.helpers import difference, rounding, shake, weights

DICTS = [
    {
        "state": "Why",
        "action": "a",
        "logprob_policy": -5.0,
        "advantage": 1.0,
        "return": 0.5,
        "value": 0.1,
        "note": 1,
    },
    {
        "state": "Whya",
        "action": "b",
        "logprob_policy": -4.0,
        "advantage": -1.0,
        "return": 0.4,
        "value": 0.2,
        "note": 2,
    },
    {
        "state": "How",
        "action": "c",
        "logprob_policy": -3.0,
        "advantage": 0.5,
        "return": 0.3,
        "value": 0.3,
        "note": 3,
    },
]


def test_the_buffer_takes_plain_dicts_and_training_takes_what_it_returns(make_config):
    buffer = ExperienceBuffer(minibatch_size=1)
    batches = list(buffer.store(DICTS))
    assert sorted(pair["note"] for batch in batches for pair in batch) == [1, 2, 3]
    assert sorted(len(batch) for batch in batches) == [1, 2]
    again = list(buffer.store(DICTS[:2]).epoch(1))
    assert sorted(len(batch) for batch in again) == [1, 2, 2]
    together = next(iter(ExperienceBuffer(minibatch_size=4).store(DICTS)))
    trainers = [shake(PPOTrainer(make_config())) for _ in range(2)]
    assert trainers[0].model_trainer.train_step(together) == pytest.approx(
        trainers[1].model_trainer.train_step(DICTS), abs=1e-5
    )
    assert difference(*map(weights, trainers)) < rounding(trainers[0])


@pytest.mark.parametrize(
    "name",
    ["kl_divergence", "reward_adjuster", "value_adder", "td_error", "gae_advantage", "return_calculator"],
)
def test_a_phase_that_returns_plain_dicts_fits_the_pipeline(make_config, prompts, name):
    """Each phase in turn is wrapped so that it reads and returns lists of dicts; the step is the same to
    rounding."""
    settings = make_config(top_k=0, top_p=1.0, ppo_epochs=1)
    plain, replaced = shake(PPOTrainer(settings)), shake(PPOTrainer(settings))
    original = getattr(replaced, name)

    class Phase:
        def __getattr__(self, method):
            return lambda pairs, *rest: getattr(original, method)(pairs, *rest).to_dicts()

    setattr(replaced, name, Phase())
    expected, got = plain.ppo_step(prompts), replaced.ppo_step(prompts)
    assert got["generated_texts"] == expected["generated_texts"]
    assert got["policy_loss"] == pytest.approx(expected["policy_loss"], rel=1e-3, abs=1e-4)
    assert difference(weights(plain), weights(replaced)) < rounding(plain)


def test_an_estimator_of_the_users_own_is_found_by_its_name(make_config, prompts, monkeypatch):
    """It gets the pairs with rewards and values, and what it returns is trained on."""
    seen = []

    def rewards_alone(outcome, terms):
        seen.append((terms.gamma, terms.lam, terms.value_lam, terms.parts.td_error))
        reward = outcome.pairs.column("reward")
        return Credit(reward, outcome.values + reward)

    monkeypatch.setitem(ESTIMATORS, "rewards_alone", rewards_alone)
    trainer = PPOTrainer(make_config(whiten_advantages=False))
    trainer.estimator = "rewards_alone"
    pairs = trainer.ppo_step(prompts)["sa_pairs"]
    config = trainer.config
    assert seen == [(config.gamma, config.lam, 1.0, trainer.td_error)]
    assert torch.equal(pairs.column("advantage"), pairs.column("reward"))
    assert "td_error" not in pairs.columns
    record = answer(trainer, prompts, followed=1).records[0]  # evaluations show it token by token
    assert record["columns"]["advantage"] == record["columns"]["reward"]


@pytest.mark.parametrize("value_target", ["lambda_return", "reward_to_go"])
def test_replaced_parts_of_gae_are_what_a_step_calls(make_config, prompts, value_target):
    trainer = PPOTrainer(make_config(value_target=value_target))
    called = []
    methods = {
        "td_error": "compute_td_errors",
        "gae_advantage": "compute_gae_advantages",
        "return_calculator": "add_reward_to_go",
    }

    class Part:
        def __init__(self, original):
            self.original = original

        def __getattr__(self, method):
            called.append(method)
            return getattr(self.original, method)

    for name in methods:
        setattr(trainer, name, Part(getattr(trainer, name)))
    trainer.ppo_step(prompts)
    expected = list(methods.values())
    assert called == (expected[:2] if value_target == "lambda_return" else expected)
