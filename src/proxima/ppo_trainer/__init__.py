"""The PPO pipeline: the workers, and the trainer that calls them in order. In: prompts. Out: a better policy,
and metrics.

Names are imported when first used: the evaluator uses some of the workers, and the trainer uses the
evaluator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxima.ppo_trainer.generator import SequenceGenerator
    from proxima.ppo_trainer.model_trainer import ModelTrainer
    from proxima.ppo_trainer.ppo_trainer import PPOTrainer
    from proxima.ppo_trainer.reward_computer import RewardComputer
    from proxima.ppo_trainer.training_results import TrainingResults
    from proxima.ppo_trainer.value_adder import ValueAdder

_HOME = {
    "ModelTrainer": "model_trainer",
    "PPOTrainer": "ppo_trainer",
    "RewardComputer": "reward_computer",
    "SequenceGenerator": "generator",
    "TrainingResults": "training_results",
    "ValueAdder": "value_adder",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'proxima.ppo_trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"proxima.ppo_trainer.{_HOME[name]}"), name)
