"""Proxima: PPO fine-tuning of language models with human feedback, on a laptop, on one GPU, on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxima.core import moved_modules
from proxima.core.lazy_exports import lazy_exports
from proxima.runtime.threads import shorten_waits

if TYPE_CHECKING:
    from proxima.advantage import GAEAdvantage, ReturnCalculator, TDError, compute_advantages
    from proxima.base_setup import BaseSetup
    from proxima.config import PPOConfig, RewardSpec
    from proxima.core.pairs import SAPairs
    from proxima.environments import Step
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

__all__, __getattr__ = lazy_exports(__name__)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
