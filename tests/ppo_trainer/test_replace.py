"""Any component can be replaced, by one that knows nothing but lists of dicts."""

import pytest

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
def test_a_stage_that_returns_plain_dicts_fits_the_road(make_config, prompts, name):
    """Each stage in turn is wrapped so that it reads and returns lists of dicts; the step is the same to
    rounding."""
    settings = make_config(top_k=0, top_p=1.0, ppo_epochs=1)
    plain, replaced = shake(PPOTrainer(settings)), shake(PPOTrainer(settings))
    original = getattr(replaced, name)

    class Stage:
        def __getattr__(self, method):
            return lambda pairs, *rest: getattr(original, method)(pairs, *rest).to_dicts()

    setattr(replaced, name, Stage())
    expected, got = plain.ppo_step(prompts), replaced.ppo_step(prompts)
    assert got["generated_texts"] == expected["generated_texts"]
    assert got["policy_loss"] == pytest.approx(expected["policy_loss"], rel=1e-3, abs=1e-4)
    assert difference(weights(plain), weights(replaced)) < rounding(plain)
