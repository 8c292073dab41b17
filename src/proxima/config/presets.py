"""Presets: sets of defaults by name, for `proxima train --preset NAME` and `PPOConfig.from_preset`.

A preset says how advantages are estimated and the models updated, with learning rates by the model's size
(0). It leaves alone what depends on the task: batch and response sizes, the reward. (`16gb` says how little
memory a run may take.) Files of settings and flags win over it, and a run writes down every value, so that
resuming it needs no preset. docs/methods.md compares them.
"""

from __future__ import annotations

from typing import Literal

Preset = Literal["", "stable", "fast", "sao", "grpo", "16gb"]

PRESETS: dict[str, dict[str, object]] = {
    # PPO with what was learned since 2022: undiscounted scores; lambda by the length of a response, and
    # another one for the value model, which learns first and learns on when `kl_stop` ends the policy's
    # update (VC-PPO, VAPO, SAO); room for unlikely tokens (DAPO)
    "stable": {
        "learning_rate": 0.0,
        "value_learning_rate": 0.0,
        "gamma": 1.0,
        "lam_alpha": 1.5,
        "clip_epsilon_high": 0.28,
        "value_epochs": 4,
        "critic_warmup_steps": 2,
        "kl_stop": 0.1,
    },
    # no value model: the smallest step that still compares responses to one prompt
    "fast": {
        "learning_rate": 0.0,
        "adv_estimator": "rloo",
        "num_generations": 2,
        "whiten_advantages": False,
        "ppo_epochs": 1,
    },
    # SAO (2026): one response per prompt, tokens far from the policy that sampled them are masked
    "sao": {
        "learning_rate": 0.0,
        "value_learning_rate": 0.0,
        "gamma": 1.0,
        "objective": "dis",
        "clip_epsilon": 0.3,
        "clip_epsilon_high": 5.0,
        "lam_alpha": 1.5,
        "ppo_epochs": 1,
        "value_epochs": 2,
        "critic_warmup_steps": 10,
    },
    # GRPO with the corrections of DAPO: every token counts alike, room for unlikely tokens
    "grpo": {
        "learning_rate": 0.0,
        "adv_estimator": "grpo",
        "num_generations": 8,
        "whiten_advantages": False,
        "clip_epsilon_high": 0.28,
        "ppo_epochs": 1,
    },
    # memory, not method: an 8B model and sequences of 512 + 512 tokens took 12.2 GiB on an H200
    "16gb": {
        "quantize": "nf4",
        "gradient_checkpointing": True,
        "micro_batch_tokens": 2048,
    },
}


def preset_values(name: object) -> dict[str, object]:
    """The settings of a preset, or an error that names them all."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"preset ({name!r}) must be one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])
