"""Before PPO: supervised fine-tuning, reward training.

In: demonstrations, preferences, ratings. Out: adapters.
"""

from proxima.data import (
    Demonstration,
    Preference,
    Rating,
    read_demonstrations,
    read_preferences,
    read_ratings,
)
from proxima.finetuning.finetuning_trainer import StageResults
from proxima.finetuning.rating_trainer import RatingTrainer
from proxima.finetuning.reward_trainer import RewardTrainer
from proxima.finetuning.sft_trainer import SFTTrainer

__all__ = [
    "Demonstration",
    "Preference",
    "Rating",
    "RatingTrainer",
    "RewardTrainer",
    "SFTTrainer",
    "StageResults",
    "read_demonstrations",
    "read_preferences",
    "read_ratings",
]
