"""How fast a PPO step is on this machine, beside the floor its hardware sets. In: shapes. Out: a table and a JSON file."""

from proxima.bench.bench import CASES, Case, run_case
from proxima.bench.beside import beside_line, run_beside
from proxima.bench.floor import Machine, measure_machine
from proxima.bench.peer import run_peer
from proxima.bench.random_model import SHAPES, make_random_model
from proxima.bench.scaling import growth_plot, run_scaling, scaling_table
from proxima.bench.table import table

__all__ = [
    "CASES",
    "SHAPES",
    "Case",
    "Machine",
    "beside_line",
    "growth_plot",
    "make_random_model",
    "measure_machine",
    "run_beside",
    "run_case",
    "run_peer",
    "run_scaling",
    "scaling_table",
    "table",
]
