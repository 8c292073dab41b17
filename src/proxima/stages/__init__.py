"""Before the road: supervised fine-tuning and reward training. In: demonstrations or preferences. Out: an adapter or model."""

from proxima.stages.examples import Demonstration, Preference, read_demonstrations, read_preferences
from proxima.stages.reward_trainer import RewardTrainer
from proxima.stages.sft_trainer import SFTTrainer
from proxima.stages.stage_trainer import StageResults

__all__ = [
    "Demonstration",
    "Preference",
    "RewardTrainer",
    "SFTTrainer",
    "StageResults",
    "read_demonstrations",
    "read_preferences",
]
