"""Settings of the method under every estimator and objective: each has an effect, is named as idle and has
none, or is refused in a line that says what to set."""

from dataclasses import dataclass
from itertools import product

import pytest

from proxima.config import PPOConfig
from proxima.ppo_trainer import PPOTrainer
from tests.helpers import difference, on_another_engine, shake, weights

ESTIMATORS = ("gae", "rloo", "grpo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
OBJECTIVES = ("ppo", "cispo", "dis")
SCALED = {"rloo", "grpo", "dr_grpo"}
ALL, GAE = {*ESTIMATORS}, {"gae"}
ANY, PPO = {*OBJECTIVES}, {"ppo"}


@dataclass(frozen=True)
class Row:
    """A value of a setting, and the methods under which it has an effect."""

    name: str
    value: object
    estimators: set[str]
    objectives: set[str]
    refused_elsewhere: bool = False  # else: named as idle
    beside: tuple[tuple[str, object], ...] = ()


ROWS = (
    Row("gamma", 0.5, GAE, ANY),
    Row("lam", 0.3, GAE, ANY),
    Row("lam", 0.3, set(), ANY, beside=(("lam_alpha", 1.5),)),
    Row("value_learning_rate", 3e-3, GAE, ANY, True),
    Row("value_model", "policy", GAE, ANY, True),
    Row("value_clip", 0.001, GAE, ANY, True),
    Row("value_coef", 3.0, set(), ANY),
    Row("value_coef", 3.0, GAE, ANY, True, (("value_model", "policy"),)),
    Row("value_lam", 0.3, GAE, ANY, True),
    Row("value_target", "lambda_return", GAE, ANY, True),
    Row("value_epochs", 1, GAE, ANY, True),
    Row("lam_alpha", 0.3, GAE, ANY, True),
    Row("critic_warmup_steps", 1, GAE, ANY, True),
    Row("critic_warmup_until", 0.9, GAE, ANY, True),
    Row("cut_responses", "bootstrap", GAE, ANY, True),
    Row("cut_responses", "leave_out", ALL, ANY),
    Row("whiten_advantages", True, ALL - SCALED, ANY, True),
    Row("clip_epsilon", 0.001, ALL, ANY),
    Row("clip_epsilon_high", 0.001, ALL, ANY),
    Row("clip_epsilon", 0.001, ALL, {"ppo", "dis"}, beside=(("clip_epsilon_high", 0.05),)),
    Row("dual_clip", 1.001, ALL, PPO, True),
    Row("kl_loss_coef", 0.5, ALL, ANY),
    Row("kl_loss", "k2", set(), ANY),
    Row("kl_loss", "k3", ALL, ANY, beside=(("kl_loss_coef", 0.5),)),
    Row("entropy_coef", 0.5, ALL, ANY),
    Row("loss_weighting", "sequence", ALL, ANY),
    Row("loss_weighting", "horizon", ALL, ANY),
    Row("ppo_epochs", 1, ALL, ANY),
    Row("kl_coef", 0.9, ALL, ANY),
    Row("importance_mode", "mask", ALL, {"ppo", "cispo"}, True, (("engine", "vllm"), ("importance_low", 0.9))),
    Row("importance_clip", 1.1, ALL, {"ppo", "cispo"}, True, (("engine", "vllm"),)),
    Row("num_generations", 2, ALL, ANY),
)  # fmt: skip


def settings_of(row, estimator, objective):
    """Without the setting."""
    common = {"adv_estimator": estimator, "objective": objective, "num_generations": 3}
    return {**common, "whiten_advantages": False, "value_learning_rate": 1e-4, **dict(row.beside)}


def is_refused(row, estimator, objective):
    """Whether the row's own setting is, or one that stands beside it."""
    needs_critic = {row.name, *dict(row.beside)} & {"value_coef", "value_model", "lam_alpha"}
    used = estimator in row.estimators and objective in row.objectives
    return (estimator != "gae" and bool(needs_critic)) or (row.refused_elsewhere and not used)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}={row.value}")
@pytest.mark.parametrize(("estimator", "objective"), product(ESTIMATORS, OBJECTIVES))
def test_a_setting_is_read_idle_or_refused(row, estimator, objective):
    given = {**settings_of(row, estimator, objective), row.name: row.value}
    if is_refused(row, estimator, objective):
        with pytest.raises(ValueError, match=r"set|leave") as caught:
            PPOConfig(**given)
        assert "\n" not in str(caught.value)
        assert any(name in str(caught.value) for name in (row.name, *dict(row.beside)))
    else:
        used = estimator in row.estimators and objective in row.objectives
        assert (row.name in PPOConfig(**given).idle_settings) == (not used)


def signed(prompts, texts):
    return [3.0 * (len(text) % 3 - 1) for text in texts]


@pytest.fixture(scope="module")
def without():
    """Weights after two steps without the setting, by the other settings."""
    return {}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}={row.value}")
@pytest.mark.parametrize(
    ("estimator", "objective"),
    [("gae", "ppo"), ("gae", "cispo"), ("gae", "dis"), ("rloo", "ppo"), ("reinforce_plus_plus", "ppo")],
)
def test_what_is_read_changes_the_outcome_and_what_is_idle_does_not(
    make_config, prompts, without, row, estimator, objective
):
    if is_refused(row, estimator, objective):
        return
    common = settings_of(row, estimator, objective)
    common.pop("engine", None)  # another engine that samples, without one

    def two_steps(**settings):
        ragged = {
            "learning_rate": 5e-3,
            "minibatch_size": 2,
            "rewards": (signed,),
            "max_new_tokens": 5,
            "temperature": 1.5,
        }
        trainer = on_another_engine(shake(PPOTrainer(make_config(**{**ragged, **common, **settings}))))
        trainer.models.eos_ids = tuple(range(0, 200, 3))  # some responses end, and some are cut
        for _ in range(2):
            trainer.ppo_step(prompts[:2])
        return weights(trainer)

    if str(common) not in without:
        without[str(common)] = two_steps()
    used = estimator in row.estimators and objective in row.objectives
    before, after = without[str(common)], two_steps(**{row.name: row.value})
    roles = [role for role in before if before[role].shape == after[role].shape]  # a head has another
    assert (difference({role: before[role] for role in roles}, after) > 0) == used
