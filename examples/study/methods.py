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
VARIANTS: dict[str, dict[str, Any]] = {
    "kl_0.2": {"kl_coef": 0.2},
    "lam_1": {"lam": 1.0},
    "lam_0.9": {"lam": 0.9, "value_epochs": 4},
    "value_epochs": {"value_epochs": 6},
    "value_from_reward": {"value_model": "./reward", "critic_warmup_steps": 2, "value_epochs": 4},
    "large_minibatches": {"minibatch_size": 64, "ppo_epochs": 4, "value_epochs": 6},
    "kl_0.2_value_epochs": {"kl_coef": 0.2, "value_epochs": 6, "clip_epsilon_high": 0.28},
    "kl_0.2_large_minibatches": {"kl_coef": 0.2, "minibatch_size": 64, "ppo_epochs": 4, "value_epochs": 6},
    "kl_0.2_groups": {"kl_coef": 0.2, "num_generations": 4, "value_epochs": 4},
    "kl_0.2_rloo": groups_of(4, "rloo", kl_coef=0.2),
    "kl_loss": {"kl_coef": 0.0, "kl_loss_coef": 0.2},
    "kl_both": {"kl_coef": 0.1, "kl_loss_coef": 0.1, "value_epochs": 6},
}


def settings_of(method: str) -> dict[str, Any]:
    """All PPO settings of a method, or of a preset or variant, by its name."""
    chosen = (METHODS | VARIANTS)[method]
    prompts = RESPONSES // chosen.get("num_generations", 1)
    return {**COMMON, "batch_size": prompts, **chosen}


if __name__ == "__main__":
    for name, chosen in (METHODS | VARIANTS).items():
        print(f"{name:26} {chosen}")
