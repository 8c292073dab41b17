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
WIDE = (0.5, 2.0)  # a band that means something for tokens, and nothing for means over responses


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
    if config.objective == "dis" and (moved := _moved(config, OF_THE_WEIGHTS)):
        raise ValueError(
            "objective dis takes its ratio to the policy that sampled, and importance weights would count it "
            f"twice: leave {', '.join(moved)} out"
        )
    if config.objective != "ppo" and config.dual_clip:
        raise ValueError(
            f"dual_clip bounds the loss of objective ppo, not of {config.objective}: set it to 0"
        )


def idle_credit(config: PPOConfig) -> dict[str, tuple[str, str]]:
    """Settings that have no effect with the others as they are: what is wrong, and what to do."""
    unread: dict[str, str] = {}
    if not config.has_critic:  # undiscounted, as a gamma and a lambda of 1 would be
        reader = f"adv_estimator {config.adv_estimator}"
        unread = {name: reader for name in ("gamma", "lam") if getattr(config, name) != 1}
    elif config.lam_alpha:
        unread = {"lam": f"lam_alpha ({config.lam_alpha:g}), which replaces it"}
    if config.importance_mode == "truncate":
        unread["importance_low"] = "importance_mode truncate"
    if config.objective == "cispo" and config.clip_epsilon_high:
        unread["clip_epsilon"] = f"objective cispo and clip_epsilon_high ({config.clip_epsilon_high:g})"
    if config.kl_controller == "budget":
        unread["kl_horizon"] = "kl_controller budget"
        unread["kl_coef"] = "kl_controller budget, which finds its own as soon as rewards differ"
    found = {
        name: (f"{name} ({getattr(config, name):g}) has no effect with {unread[name]}", f"leave {name} out")
        for name in _moved(config, unread)
    }
    low, high = config.importance_low, config.importance_clip
    if config.importance_mode == "sequence_mask" and low <= WIDE[0] and high >= WIDE[1]:
        found["importance_mode"] = (
            f"importance_mode sequence_mask has no effect in practice from {low:g} to {high:g}: the "
            "geometric mean of a response's weights is nearly always within 0.99 to 1.01",
            "set importance_low and importance_clip, for example to 0.99 and 1.01",
        )
    return found


def _moved(config: PPOConfig, names: Iterable[str]) -> list[str]:
    """Those of the settings that are not at their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return [name for name in names if getattr(config, name) != defaults[name]]


def _refuse_critic_settings(config: PPOConfig) -> None:
    moved = _moved(config, OF_THE_CRITIC)
    if config.cut_responses == "bootstrap":
        moved.append("cut_responses bootstrap")
    if moved:
        raise ValueError(
            f"adv_estimator {config.adv_estimator} has no value model, which {', '.join(moved)} "
            f"need{'s' if len(moved) == 1 else ''}: leave out, or set adv_estimator to gae"
        )
