"""A finished run, judged on held-out prompts. In: a run's folder and prompts. Out: policy and reference side by side.

Both are sampled with the same noise and scored by the run's own rewards (or others, where given).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxima.config import PPOConfig, RewardSpec
from proxima.errors import RewardFailure
from proxima.evaluator import win_rate
from proxima.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.held_out import answer


def run_config(run: str | Path) -> PPOConfig:
    path = Path(run) / "config.yaml"
    if not (Path(run) / "policy").is_dir() or not path.is_file():
        raise ValueError(f"{run} is not the folder of a finished `proxima train` run (no config.yaml and policy/ in it)")
    return PPOConfig.from_yaml(path)


def open_run(run: str | Path, rewards: Sequence[RewardSpec] = (), **changes: Any) -> PPOTrainer:
    """The trainer of a finished run, before its trained weights are loaded: policy and reference are still the same."""
    config = run_config(run)
    return PPOTrainer(replace(config, rewards=tuple(rewards) or config.rewards, trackers=(), **changes))


def evaluate_run(run: str | Path, prompts: Sequence[str], rewards: Sequence[RewardSpec] = (), **changes: Any) -> dict[str, Any]:
    """
    Args:
        rewards: judges other than the run's own.
        changes: settings to evaluate with, for example `temperature`.
    Returns: `reference` and `policy` by metric, the `win_rate`, and `samples`; also written to `evaluation.json` in the run.
    """
    trainer = open_run(run, rewards, **changes)
    reference = answer(trainer, prompts)
    trainer.load(run)
    policy = answer(trainer, prompts)
    if all(map(math.isnan, reference.scores)) or all(map(math.isnan, policy.scores)):
        raise RewardFailure(f"all rewards failed, nothing was judged; the last reason: {trainer.reward_computer.last_failure}")
    results = {
        "prompts": len(prompts),
        "rewards": trainer.reward_computer.reward_source,
        "reference": reference.measured,
        "policy": policy.measured,
        "win_rate": win_rate(policy.scores, reference.scores, trainer.config.seed),
        "samples": [
            {"prompt": row[0], "reference": row[1], "reference_reward": row[2], "policy": row[3], "policy_reward": row[4]}
            for row in zip(prompts, reference.texts, reference.scores, policy.texts, policy.scores, strict=True)
        ],
    }
    text = json.dumps(_with_null(results), indent=2, ensure_ascii=False)
    (Path(run) / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    return results


def _with_null(value: Any) -> Any:
    """The same with null for nan, which JSON has not."""
    if isinstance(value, dict):
        return {name: _with_null(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_null(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
