# python -m examples.study.methods
"""The methods that the study compares: what each changes in the settings of the embedded world.

Every method gets as many responses per step, and as many steps: methods with groups have fewer prompts. In:
nothing. Out: the table, printed.
"""

from typing import Any

from proxima.config import PRESETS
from proxima.world.demo_settings import PPO_SETTINGS

RESPONSES = PPO_SETTINGS["batch_size"]  # per step
COMMON: dict[str, Any] = {**PPO_SETTINGS, "learning_rate": 1e-3, "eval_every": 10, "token_samples": 0}
NO_CRITIC: dict[str, Any] = {"whiten_advantages": False, "value_learning_rate": 1e-4}


def groups_of(size: int, estimator: str, **settings: Any) -> dict[str, Any]:
    return {"adv_estimator": estimator, "num_generations": size, **NO_CRITIC, **settings}


def preset(name: str) -> dict[str, Any]:
    return {**PRESETS[name], **(NO_CRITIC if "adv_estimator" in PRESETS[name] else {})}


METHODS: dict[str, dict[str, Any]] = {
    "ppo_2022": {},
    "ppo_warm": {"critic_warmup_until": 0.3},
    "rloo": groups_of(4, "rloo"),
    "grpo": groups_of(8, "grpo", loss_weighting="sequence"),
    "dr_grpo": groups_of(8, "dr_grpo", loss_weighting="horizon"),
    "preset_stable": preset("stable"),
    "preset_fast": preset("fast"),
    "preset_sao": preset("sao"),
    "preset_grpo": preset("grpo"),
}
CONSTANT = {"lr_schedule": "constant"}  # a KL that is held, not one that stops because the learning rate does
WARM = {"value_epochs": 6, "critic_warmup_steps": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "lam_1": {"lam": 1.0, **WARM},
    "lam_0.95": WARM,
    "lam_0.8": {"lam": 0.8, **WARM},
    "lam_0.5": {"lam": 0.5, **WARM},
    "kl_0.05": {"kl_coef": 0.05, "lam": 0.8, **WARM},
    "kl_0.2": {"kl_coef": 0.2, "lam": 0.8, **WARM},
    "kl_0.2_lam_0.95": {"kl_coef": 0.2, **WARM},
    "value_from_reward": {"lam": 0.8, "value_model": "./reward", **WARM},
    "large_minibatches": {"lam": 0.8, "minibatch_size": 64, **WARM},
    "one_epoch": {"lam": 0.8, "ppo_epochs": 1, **WARM},
    "clip_higher": {"lam": 0.8, "clip_epsilon_high": 0.28, **WARM},
    "kl_loss": {"kl_coef": 0.0, "kl_loss_coef": 0.1, "lam": 0.8, **WARM},
    "kl_budget": {"kl_controller": "budget", "kl_target": 1.5, "lam": 0.8, **WARM},
    "fixed": CONSTANT,
    "adaptive": {"kl_controller": "adaptive", "kl_target": 4.0, "kl_horizon": 400, **CONSTANT},
    "budget": {"kl_controller": "budget", "kl_target": 4.0, **CONSTANT},
    "kl_0.2_rloo": groups_of(4, "rloo", kl_coef=0.2),
}


def settings_of(method: str) -> dict[str, Any]:
    """All PPO settings of a method, or of a preset or variant, by its name."""
    chosen = (METHODS | VARIANTS)[method]
    prompts = RESPONSES // chosen.get("num_generations", 1)
    return {**COMMON, "batch_size": prompts, **chosen}


if __name__ == "__main__":
    for name, chosen in (METHODS | VARIANTS).items():
        print(f"{name:26} {chosen}")
