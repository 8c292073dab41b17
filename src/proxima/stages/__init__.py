"""Before the road: supervised fine-tuning, reward training. In: demonstrations, preferences, ratings. Out: adapters."""

from proxima.data import Demonstration, Preference, Rating, read_demonstrations, read_preferences, read_ratings
from proxima.stages.rating_trainer import RatingTrainer
from proxima.stages.reward_trainer import RewardTrainer
from proxima.stages.sft_trainer import SFTTrainer
from proxima.stages.stage_trainer import StageResults

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
