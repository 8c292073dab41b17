"""How fast a PPO step is on this machine, beside the floor its hardware sets. In: shapes. Out: a table and a JSON file."""

from proxima.bench.bench import Case, run_case
from proxima.bench.random_model import SHAPES, make_random_model

__all__ = ["SHAPES", "Case", "make_random_model", "run_case"]
