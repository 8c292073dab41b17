"""Before PPO: supervised fine-tuning and reward-model training.

In: demonstrations, preferences, ratings. Out: adapters.
"""

import warnings

from proxima.data import (
    Demonstration,
    Preference,
    Rating,
    read_demonstrations,
    read_preferences,
    read_ratings,
)
from proxima.finetuning.finetuning_trainer import FinetuningResults, FinetuningTrainer
from proxima.finetuning.learning_curve import LearningCurve
from proxima.finetuning.rating_trainer import RatingTrainer, order_accuracy
from proxima.finetuning.reward_trainer import RewardTrainer, calibration_error
from proxima.finetuning.sft_trainer import SFTTrainer

__all__ = [
    "Demonstration",
    "FinetuningResults",
    "FinetuningTrainer",
    "LearningCurve",
    "Preference",
    "Rating",
    "RatingTrainer",
    "RewardTrainer",
    "SFTTrainer",
    "calibration_error",
    "order_accuracy",
    "read_demonstrations",
    "read_preferences",
    "read_ratings",
]


def __getattr__(name: str) -> object:
    if name != "StageResults":
        raise AttributeError(f"module 'proxima.finetuning' has no attribute {name!r}")
    warnings.warn("StageResults is now FinetuningResults", DeprecationWarning, stacklevel=2)
    return FinetuningResults
