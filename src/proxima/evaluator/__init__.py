"""Phase 8 of a PPO step: is it getting better, and should the run continue?

In: a step's metrics. Out: performance, convergence.
"""

from proxima.evaluator.evaluator import Evaluator
from proxima.evaluator.pair_judge import open_pair_judge
from proxima.evaluator.win_rate import win_rate

__all__ = ["Evaluator", "open_pair_judge", "win_rate"]
