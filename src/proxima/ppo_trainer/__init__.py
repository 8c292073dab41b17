"""The road itself: the workers and the trainer that calls them in order. In: prompts. Out: a better policy, and metrics."""

from proxima.ppo_trainer.generator import SequenceGenerator
from proxima.ppo_trainer.model_trainer import ModelTrainer
from proxima.ppo_trainer.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.results import TrainingResults
from proxima.ppo_trainer.reward_computer import RewardComputer
from proxima.ppo_trainer.value_adder import ValueAdder

__all__ = [
    "ModelTrainer",
    "PPOTrainer",
    "RewardComputer",
    "SequenceGenerator",
    "TrainingResults",
    "ValueAdder",
]
