"""Settings that are allowed but rarely intended. In: a config. Out: findings; nothing is loaded.

`SETTINGS_CHECKS` lists the checks that read the config alone; a new one is a function and a line there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from proxima.base_setup import rates_by_size
from proxima.config import PPOConfig
from proxima.environments import max_chosen_tokens
from proxima.tools.doctor.finding import Finding, fail, ok, warn

FAR = 10
"""How many times larger or smaller than the rule's a learning rate may be."""

LEAST_REACH = 0.05
"""Smallest share of a final score that should enter the first token's advantage directly. The published TL;DR
setup (53 tokens, gamma 1, lam 0.95) leaves 0.07. Below this, a token is trained on the value model's guess
rather than on what happened."""

SHORT = 0.1
"""Largest share of the longest response up to which a length-adaptive lambda may be 0."""


def check_rewards_given(config: PPOConfig) -> Finding:
    given = (*config.rewards, *config.environment)
    if not given:
        return fail(
            "reward", "no reward is configured, so nothing would be learned", "set rewards (docs/rewards.md)"
        )
    return ok("reward", ", ".join(f"{spec.weight:g} x {spec.label}" for spec in given))


def check_learning_rates(config: PPOConfig, parameters: int) -> Finding:
    """Against the rates by the model's size.

    Args:
        parameters: of the network without adapters.
    """
    what = "adapters" if config.lora_r else "all weights"
    for name, usual in rates_by_size(config, parameters).items():
        rate = getattr(config, name)
        if rate and not usual / FAR <= rate <= usual * FAR:
            times = f"{usual / rate:.0f} times below" if rate < usual else f"{rate / usual:.0f} times above"
            return warn(
                "learning rate",
                f"{name} ({rate:g}) is {times} what suits {what} of a model of this size",
                f"use about {usual:g}, or 0, which stands for that",
            )
    policy, value = (
        f"{rate:g}" if rate else "by the model's size"
        for rate in (config.learning_rate, config.value_learning_rate)
    )
    return ok("learning rate", f"policy {policy}, value {value}, for {what}")


def check_reach(config: PPOConfig) -> Finding:
    """How much of a score on the last action reaches the first one: (gamma * lam) ** actions between; with
    `lam_alpha`, up to which length lambda is 0."""
    name = "reach of the score"
    if not config.has_critic:
        return ok(name, f"all of it: {config.adv_estimator} does not discount")
    if config.lam_alpha:
        return _check_adaptive_lam(name, config)
    actions, kind, shorter = _longest_response(config)
    between = actions - 1
    reach = (config.gamma * config.lam) ** between
    if reach >= LEAST_REACH:
        return ok(name, f"{reach:.2g} of a final score enters the advantage {between} {kind} earlier")
    lam = math.ceil(1000 * LEAST_REACH ** (1 / between)) / 1000
    return warn(
        name,
        f"gamma ({config.gamma:g}) x lam ({config.lam:g}) lets {reach:.2g} of a final score enter the "
        f"advantage {between} {kind} earlier: the first {kind} of a long response hardly learn from it",
        f"set gamma to 1 and lam to {lam:g} or more, or {shorter}",
    )


def _longest_response(config: PPOConfig) -> tuple[int, str, str]:
    """The most actions of a response, at which gamma and lam act, what they are, and how to have fewer."""
    if config.discount == "turn":
        return config.max_turns, "turns", "lower max_turns"
    if not config.has_episodes:
        return config.max_new_tokens, "tokens", "lower max_new_tokens"
    return max_chosen_tokens(config), "tokens", "set discount to turn"  # what is read is not discounted


def _check_adaptive_lam(name: str, config: PPOConfig) -> Finding:
    actions, kind, _ = _longest_response(config)
    alone = math.floor(1 / config.lam_alpha)  # actions up to which 1 - 1 / (alpha * actions) is not above 0
    longest = max(0.0, 1 - 1 / (config.lam_alpha * actions))
    if alone <= max(1, SHORT * actions):
        return ok(name, f"lam_alpha {config.lam_alpha:g} makes lambda {longest:.2g} for the longest response")
    return warn(
        name,
        f"lam_alpha ({config.lam_alpha:g}) makes lambda 0 for responses of up to {alone} {kind} and "
        f"{longest:.2g} for the longest ({actions}): they learn from the value model's guess",
        "set lam_alpha to 1.5, which suits any length, or to 0 and use lam",
    )


def check_idle_settings(config: PPOConfig) -> Finding:
    """Settings that have no effect given the others."""
    name = "idle settings"
    found = config.idle_settings.values()  # what is wrong, what to do
    if not found:
        return ok(name, "none: every setting given has an effect")
    return warn(name, "; ".join(what for what, _ in found), "; ".join(remedy for _, remedy in found))


def check_batches(config: PPOConfig, prompts: int, epochs: int = 1) -> Finding:
    """Number of steps; batches that do not divide evenly."""
    name = "batches"
    minibatch = config.minibatch_size
    if prompts < config.batch_size:
        return warn(
            name,
            f"batch_size ({config.batch_size}) is more than the {prompts} prompts",
            "give more data or lower batch_size",
        )
    if config.num_generations > 1:
        return _check_group_batches(config, prompts, epochs)
    batch = config.batch_size
    if config.buffer_sampling != "token_budget" and minibatch > batch:
        return warn(
            name,
            f"minibatch_size ({minibatch}) is more than batch_size ({batch}): one optimiser step per epoch",
            "lower minibatch_size, or raise batch_size",
        )
    if config.buffer_sampling != "token_budget" and (rest := batch % minibatch):
        return warn(
            name,
            f"batch_size ({batch}) is not a multiple of minibatch_size ({minibatch}): the last minibatch has "
            f"{rest} sequences, whose gradients weigh more",
            f"take batch_size {batch - rest} or {batch - rest + minibatch}",
        )
    return ok(
        name,
        f"{prompts} prompts, {epochs * math.ceil(prompts / batch)} steps of {batch}, minibatches of "
        f"{minibatch}",
    )


def _check_group_batches(config: PPOConfig, prompts: int, epochs: int) -> Finding:
    responses, minibatch = config.batch_size * config.num_generations, config.minibatch_size
    if config.buffer_sampling != "token_budget" and (responses < minibatch or responses % minibatch):
        return warn(
            "batches",
            f"a step's {responses} responses (batch_size {config.batch_size} x num_generations "
            f"{config.num_generations}) are not a multiple of minibatch_size ({minibatch})",
            f"set minibatch_size to {math.gcd(responses, minibatch)} or {responses}",
        )
    steps = epochs * math.ceil(prompts / config.batch_size)
    return ok(
        "batches",
        f"{prompts} prompts, {steps} steps of {config.batch_size} x {config.num_generations} responses, "
        f"minibatches of {minibatch}",
    )


def check_remote_code(config: PPOConfig) -> Finding:
    if config.trust_remote_code:
        return warn(
            "remote code",
            "trust_remote_code runs Python code that comes with a checkpoint",
            "turn it off unless you wrote it",
        )
    return ok("remote code", "off: nothing that comes with a checkpoint is run")


SETTINGS_CHECKS: list[Callable[[PPOConfig], Finding]] = [
    check_rewards_given,
    check_reach,
    check_idle_settings,
    check_remote_code,
]
"""In the order of the table."""
