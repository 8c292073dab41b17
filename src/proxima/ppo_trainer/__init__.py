"""The PPO pipeline: the workers, and the trainer that calls them in order. In: prompts. Out: a better policy,
and metrics.

Names are imported when first used: the evaluator uses some of the workers, and the trainer uses the
evaluator.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.ppo_trainer.best_of_samples import best_samples
    from proxima.ppo_trainer.generator import SequenceGenerator
    from proxima.ppo_trainer.model_trainer import ModelTrainer
    from proxima.ppo_trainer.ppo_trainer import PPOTrainer
    from proxima.ppo_trainer.reward_computer import RewardComputer, Scores
    from proxima.ppo_trainer.step_recorder import (
        OWN_VALUE_NETWORK,
        StepRecord,
        StepRecorder,
        recorded_bytes,
        token_tensors,
        too_large,
        weights,
    )
    from proxima.ppo_trainer.step_recordings import MOST_KEPT
    from proxima.ppo_trainer.token_records import followed_records
    from proxima.ppo_trainer.trainer_state import restore_endings, restore_values
    from proxima.ppo_trainer.training_results import TrainingResults
    from proxima.ppo_trainer.value_adder import ValueAdder

__all__, __getattr__ = lazy_exports(__name__)
