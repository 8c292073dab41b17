"""Settings that have no effect with the others as they are: which, beside what, and what to set.

They are named and not refused, because old runs must load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from proxima.config.credit_checks import OF_THE_WEIGHTS, moved

if TYPE_CHECKING:
    from proxima.config.ppo_config import PPOConfig

WIDE = (0.5, 2.0)  # a band that means something for tokens, and nothing for means over responses
OF_SCORES = ("normalize_rewards", "clip_rewards")
OF_EPISODES = ("max_turns", "max_episode_tokens", "step_seconds", "step_memory_mb")


class Idle(NamedTuple):
    """Settings without effect, unless they are at their defaults, while a condition holds."""

    names: tuple[str, ...]
    holds: Callable[[PPOConfig], bool]
    beside: str  # with what they have none; braces hold settings
    remedy: str  # what to set instead of leaving them out


def _nothing_is_discounted(config: PPOConfig) -> bool:
    return config.gamma == config.lam == config.value_lam == 1 and not config.lam_alpha


def _episodes_alone_are_scored(config: PPOConfig) -> bool:
    return bool(config.environment and not config.rewards and not config.missing_eos_penalty)


IDLE = (
    # undiscounted, as a gamma and a lambda of 1 would be
    Idle(
        ("gamma",),
        lambda c: not c.has_critic and c.gamma != 1,
        "adv_estimator {adv_estimator}",
        "adv_estimator to gae",
    ),
    Idle(
        ("lam",),
        lambda c: not c.has_critic and c.lam != 1,
        "adv_estimator {adv_estimator}",
        "adv_estimator to gae",
    ),
    Idle(
        ("lam",),
        lambda c: c.lam_alpha > 0,
        "lam_alpha ({lam_alpha:g}), which replaces it",
        "lam_alpha to 0",
    ),
    Idle(("discount",), _nothing_is_discounted, "gamma 1 and lam 1", "lam below 1"),
    Idle(
        ("value_coef",),
        lambda c: c.value_model != "policy",
        "value_model {value_model}, which has an optimiser of its own",
        "value_model to policy",
    ),
    Idle(
        ("clip_epsilon",),
        lambda c: c.objective == "cispo" and c.clip_epsilon_high > 0,
        "objective cispo and clip_epsilon_high ({clip_epsilon_high:g})",
        "clip_epsilon_high to 0",
    ),
    Idle(
        ("importance_low",),
        lambda c: c.importance_mode == "truncate",
        "importance_mode truncate",
        "importance_mode to mask",
    ),
    Idle(
        OF_THE_WEIGHTS,
        lambda c: c.engine != "vllm",
        "engine {engine}, which samples from the policy itself",
        "engine to vllm",
    ),
    Idle(
        ("kl_loss",),
        lambda c: c.kl_loss_coef == 0,
        "kl_loss_coef 0",
        "kl_loss_coef, for example to 0.05",
    ),
    Idle(
        ("kl_target",),
        lambda c: c.kl_controller == "fixed",
        "kl_controller fixed",
        "kl_controller to budget",
    ),
    Idle(
        ("kl_horizon",),
        lambda c: c.kl_controller != "adaptive",
        "kl_controller {kl_controller}",
        "kl_controller to adaptive",
    ),
    Idle(
        ("kl_coef",),
        lambda c: c.kl_controller == "budget",
        "kl_controller budget, which finds its own as soon as rewards differ",
        "kl_controller to fixed",
    ),
    Idle(
        OF_SCORES,
        _episodes_alone_are_scored,
        "environment alone: it is for scores of whole responses, not of turns",
        "rewards, or scale the rewards in the environment",
    ),
    Idle(
        OF_EPISODES,
        lambda c: not c.has_episodes,
        "responses of one turn: there is neither an environment nor a tool",
        "environment or tools",
    ),
    Idle(
        ("step_memory_mb",),
        lambda c: c.has_episodes and not c.step_seconds,
        "step_seconds 0: episodes have no processes of their own",
        "step_seconds, for example to 10",
    ),
    Idle(
        ("buffer_token_budget",),
        lambda c: c.buffer_sampling != "token_budget",
        "buffer_sampling {buffer_sampling}",
        "buffer_sampling to token_budget",
    ),
)


def idle_settings(config: PPOConfig) -> dict[str, tuple[str, str]]:
    """By name: what is wrong, and what to do."""
    found: dict[str, tuple[str, str]] = {}
    for idle in IDLE:
        beside = idle.beside.format(**vars(config))
        for name in moved(config, idle.names) if idle.holds(config) else ():
            found[name] = (
                f"{name} ({_shown(getattr(config, name))}) has no effect with {beside}",
                f"leave {name} out, or set {idle.remedy}",
            )
    return found | _without_use(config)


def _without_use(config: PPOConfig) -> dict[str, tuple[str, str]]:
    """Values that cannot do what the setting is for."""
    found = {}
    low, high = config.importance_low, config.importance_clip
    is_wide = low <= WIDE[0] and high >= WIDE[1]
    if config.importance_mode == "sequence_mask" and config.engine == "vllm" and is_wide:
        found["importance_mode"] = (
            f"importance_mode sequence_mask has no effect in practice from {low:g} to {high:g}: the "
            "geometric mean of a response's weights is nearly always within 0.99 to 1.01",
            "set importance_low and importance_clip, for example to 0.99 and 1.01",
        )
    if config.kl_controller == "adaptive" and config.kl_coef == 0:
        found["kl_controller"] = (
            "kl_controller adaptive multiplies kl_coef, and 0 stays 0: there is no KL penalty at any "
            "distance",
            "start with kl_coef above 0, for example 0.1, or set kl_controller to fixed",
        )
    if config.buffer_overflow == "drop_oldest":
        found["buffer_overflow"] = (
            "buffer_overflow drop_oldest acts as error: a PPO step holds one rollout, and nothing older to "
            "drop",
            "set buffer_overflow to error or disk",
        )
    return found


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
