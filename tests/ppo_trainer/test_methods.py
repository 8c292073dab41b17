"""Every method in whole steps: neither the cut into micro-batches nor the order of a rollout changes what is
trained on, and a run that died resumes bit-exactly."""

from typing import get_args, get_type_hints

import pytest
import torch

from proxima.config import PRESETS, PPOConfig
from proxima.ppo_trainer import PPOTrainer
from tests.helpers import Crash, crash_at, difference, on_another_engine, rounding, shake, weights
from tests.processes_runs import CASES

GROUPS = {"num_generations": 2, "value_learning_rate": 1e-4}
METHODS = {
    "gae": {"lam_alpha": 1.5, "value_epochs": 2, "cut_responses": "bootstrap", "value_lam": 0.9},
    "gae in groups": {"num_generations": 2, "clip_epsilon_high": 0.28},
    "cispo": {"objective": "cispo", "kl_loss_coef": 0.1, "kl_loss": "k2"},
    "dis": {"objective": "dis", "loss_weighting": "sequence"},
    "rloo": {**GROUPS, "adv_estimator": "rloo", "whiten_advantages": False, "kl_loss_coef": 0.1},
    "grpo": {
        **GROUPS, "adv_estimator": "grpo", "whiten_advantages": False, "loss_weighting": "sequence",
        "kl_loss_coef": 0.1, "kl_loss": "k3",
    },
    "dr_grpo": {
        **GROUPS, "adv_estimator": "dr_grpo", "whiten_advantages": False, "loss_weighting": "horizon",
    },
    "mask": {"importance_mode": "mask", "importance_low": 0.9, "importance_clip": 1.15},
    "sequence_mask": {"importance_mode": "sequence_mask", "importance_low": 0.99, "importance_clip": 1.01},
    "reinforce_plus_plus": {**GROUPS, "adv_estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {**GROUPS, "adv_estimator": "reinforce_plus_plus_baseline"},
    **{
        f"preset {name}": {**values, **(GROUPS if "adv_estimator" in values else {}), "critic_warmup_steps": 0}
        for name, values in PRESETS.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("cases", [METHODS, CASES], ids=["here", "over processes"])
def test_no_method_is_forgotten(cases):
    hints = get_type_hints(PPOConfig)
    for name in ("adv_estimator", "objective", "loss_weighting", "kl_loss", "importance_mode"):
        default = getattr(PPOConfig(), name)
        found = {default, *(each.get(name, default) for each in cases.values())}
        assert set(get_args(hints[name])) == found, name


def on_its_engine(trainer):
    """Importance weights need log-probabilities of another one."""
    return trainer if trainer.config.importance_mode == "truncate" else on_another_engine(trainer)


@pytest.fixture
def trainer_of(make_config):
    """A trainer of a method whose responses have several lengths."""

    def make(name, **more):
        settings = {"max_new_tokens": 8, "temperature": 1.5, "ppo_epochs": 1, "minibatch_size": 4}
        trainer = on_its_engine(shake(PPOTrainer(make_config(**{**settings, **METHODS[name], **more}))))
        trainer.models.eos_ids = tuple(range(0, 200, 3))
        return trainer

    return make


@pytest.mark.parametrize("name", METHODS)
def test_a_step_does_not_depend_on_micro_batches(trainer_of, prompts, name):
    """Alone in its micro-batch a sequence has no padding either."""
    found = []
    for size in (1, 64):
        trainer = trainer_of(name, micro_batch_size=size, critic_warmup_until=0.0)
        outcome = trainer.ppo_step(prompts)
        assert len(set(outcome["sa_pairs"].lengths.tolist())) > 1
        assert (outcome["importance_truncated"] > 0) == ("mask" in name)
        found.append((weights(trainer), outcome["policy_loss"]))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4, abs=1e-5)
    assert difference(found[0][0], found[1][0]) <= rounding(trainer)


@pytest.mark.parametrize("name", METHODS)
def test_advantages_do_not_depend_on_the_order_of_a_rollout(trainer_of, prompts, name):
    trainer = trainer_of(name)
    outcome = trainer.ppo_step(prompts)
    pairs = outcome["sa_pairs"]
    rewards = torch.tensor(outcome["rewards"])
    expected = trainer.estimate_advantages(pairs, rewards).column("advantage")
    order = torch.randperm(pairs.batch_size, generator=torch.Generator().manual_seed(5))
    found = trainer.estimate_advantages(pairs.select(order), rewards[order]).column("advantage")
    mask = pairs.mask[order]
    torch.testing.assert_close(found[mask], expected[order][mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_died_resumes_bit_exactly(make_config, name):
    settings = {"batch_size": 2, "max_new_tokens": 4, "minibatch_size": 4, "checkpoint_every": 1}
    prompts, found = ["a", "b", "c", "d"], []
    for run in ("whole", "cut"):
        config = make_config(**{**settings, **METHODS[name]}, run_name=run)
        if run == "cut":
            with pytest.raises(Crash):
                crash_at(on_its_engine(PPOTrainer(config)), 2).train(prompts)
            torch.manual_seed(99)  # a new process knows nothing of the old one's generators
        trainer = on_its_engine(PPOTrainer(config))
        results = trainer.train(prompts, resume=run == "cut")
        numbers = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in results.metrics]
        found.append((weights(trainer), str(numbers)))
    assert found[0][1] == found[1][1]
    assert difference(found[0][0], found[1][0]) == 0
