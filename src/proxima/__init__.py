"""Proxima: PPO fine-tuning of language models with human feedback, on a laptop, on one GPU, on a cluster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from proxima.core import moved_modules
from proxima.runtime.threads import shorten_waits

if TYPE_CHECKING:
    from proxima.advantage import GAEAdvantage, ReturnCalculator, TDError, compute_advantages
    from proxima.base_setup import BaseSetup
    from proxima.config import PPOConfig, RewardSpec
    from proxima.core.pairs import SAPairs
    from proxima.evaluator import Evaluator
    from proxima.experience_buffer import ExperienceBuffer
    from proxima.models import PolicyModel, RewardModel, SFTModel, ValueModel
    from proxima.ppo_trainer import (
        ModelTrainer,
        PPOTrainer,
        RewardComputer,
        SequenceGenerator,
        TrainingResults,
        ValueAdder,
    )
    from proxima.reward_kl import KLDivergence, RewardAdjuster
    from proxima.runs import Run
    from proxima.token_attribution import TokenAttributor

__version__ = "0.1.0"

moved_modules.install()
shorten_waits()  # before torch is loaded, by us or by whoever imports us

_HOME = {
    "BaseSetup": "base_setup",
    "Evaluator": "evaluator",
    "ExperienceBuffer": "experience_buffer",
    "GAEAdvantage": "advantage",
    "KLDivergence": "reward_kl",
    "ModelTrainer": "ppo_trainer",
    "PPOConfig": "config",
    "PPOTrainer": "ppo_trainer",
    "PolicyModel": "models",
    "ReturnCalculator": "advantage",
    "RewardAdjuster": "reward_kl",
    "RewardComputer": "ppo_trainer",
    "RewardModel": "models",
    "RewardSpec": "config",
    "Run": "runs",
    "SAPairs": "core.pairs",
    "SFTModel": "models",
    "SequenceGenerator": "ppo_trainer",
    "TDError": "advantage",
    "TokenAttributor": "token_attribution",
    "TrainingResults": "ppo_trainer",
    "ValueAdder": "ppo_trainer",
    "ValueModel": "models",
    "compute_advantages": "advantage",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import proxima` and the command line's --help
    stay quick."""
    if name not in _HOME:
        raise AttributeError(f"module 'proxima' has no attribute {name!r}")
    return getattr(importlib.import_module(f"proxima.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
