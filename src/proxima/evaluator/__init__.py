"""Evaluation: is it getting better, and should the run continue (phase 8 of a PPO step)?

In: a step's metrics. Out: performance, convergence.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.evaluator.best_of_n import best_of_kl, best_of_mean, powers_up_to
    from proxima.evaluator.diversity import common_opening, copying, distinct, repetition, words
    from proxima.evaluator.evaluator import Evaluator
    from proxima.evaluator.finished_run import evaluate_run, open_run, run_config, saved_config
    from proxima.evaluator.held_out import VALIDATION_STEP, Answers, HeldOut, answer
    from proxima.evaluator.judges import OWN, Judges, check_judges, compare_answers
    from proxima.evaluator.pair_judge import PairJudge, open_pair_judge
    from proxima.evaluator.win_rates import mean_interval, preferences, share_won, win_rate

__all__, __getattr__ = lazy_exports(__name__)
