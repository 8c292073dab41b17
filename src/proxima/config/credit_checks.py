"""Settings of advantages and objective that contradict each other are refused, in one line that says what to
set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxima.config.ppo_config import PPOConfig

BY_GROUP = ("rloo", "grpo", "dr_grpo", "reinforce_plus_plus_baseline")
WITHOUT_CRITIC = (*BY_GROUP, "reinforce_plus_plus")
SCALED_BY_GROUP = ("rloo", "grpo", "dr_grpo")
OF_THE_CRITIC = (
    "value_learning_rate",
    "value_model",
    "value_clip",
    "value_coef",
    "value_lam",
    "value_target",
    "value_epochs",
    "lam_alpha",
    "critic_warmup_steps",
    "critic_warmup_until",
)

OF_THE_WEIGHTS = ("importance_mode", "importance_low", "importance_clip")


def check_credit(config: PPOConfig) -> None:
    """A ValueError where settings contradict each other."""
    name = config.adv_estimator
    if name in BY_GROUP and config.num_generations < 2:
        raise ValueError(
            f"adv_estimator {name} compares responses to one prompt: set num_generations to 2 or more, for "
            f"example 8 (it is {config.num_generations})"
        )
    if name in SCALED_BY_GROUP and config.whiten_advantages:
        raise ValueError(
            f"adv_estimator {name} scales advantages by its groups: set whiten_advantages to false"
        )
    if not config.has_critic:
        _refuse_critic_settings(config)
    if config.value_epochs and config.value_model == "policy":
        raise ValueError(
            "value_epochs need a value model of its own, but value_model policy shares the policy's trunk "
            "and its gradients: set value_epochs to 0 or value_model to adapter"
        )
    if config.value_target == "lambda_return" and config.value_lam != 1:
        raise ValueError(
            f"value_target lambda_return is the policy's lambda, and value_lam ({config.value_lam}) another: "
            "leave value_target out"
        )
    if config.cut_responses != "terminal" and config.missing_eos_penalty:
        raise ValueError(
            f"missing_eos_penalty is part of a cut response's score, which cut_responses "
            f"{config.cut_responses} does not use: set one of them to its default"
        )
    if config.discount == "turn" and not (config.has_episodes and config.has_critic):
        why = (
            "there are none without environment or tools"
            if config.has_critic
            else f"{name} does not discount"
        )
        raise ValueError(f"discount turn acts between turns, and {why}: leave discount out")
    if config.objective == "dis" and (given := moved(config, OF_THE_WEIGHTS)):
        raise ValueError(
            "objective dis takes its ratio to the policy that sampled, and importance weights would count it "
            f"twice: leave {', '.join(given)} out"
        )
    if config.objective != "ppo" and config.dual_clip:
        raise ValueError(
            f"dual_clip bounds the loss of objective ppo, not of {config.objective}: set it to 0"
        )


def moved(config: PPOConfig, names: Iterable[str]) -> list[str]:
    """Those of the settings that are not at their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return [name for name in names if getattr(config, name) != defaults[name]]


def _refuse_critic_settings(config: PPOConfig) -> None:
    given = moved(config, OF_THE_CRITIC)
    if config.cut_responses == "bootstrap":
        given.append("cut_responses bootstrap")
    if given:
        raise ValueError(
            f"adv_estimator {config.adv_estimator} has no value model, which {', '.join(given)} "
            f"need{'s' if len(given) == 1 else ''}: leave out, or set adv_estimator to gae"
        )
