"""How fast a PPO step, or one of fine-tuning, is on this machine, compared with the floor its hardware sets.

In: shapes. Out: a table and a JSON file.
"""

from proxima.tools.bench.bench_case import CASES, Case, run_case
from proxima.tools.bench.bench_table import finetuning_table, table
from proxima.tools.bench.beside import beside_line, run_beside
from proxima.tools.bench.finetuning_case import FINETUNING_CASES, FinetuningCase, run_finetuning_case
from proxima.tools.bench.generation_peers import run_generation_peer
from proxima.tools.bench.growth import (
    growth_plot,
    lengths_plot,
    lengths_table,
    run_lengths,
    run_scaling,
    scaling_table,
)
from proxima.tools.bench.hardware_floor import Machine, measure_machine
from proxima.tools.bench.random_model import CPU_SIZES, SHAPES, make_random_model
from proxima.tools.bench.step_profile import profile_table
from proxima.tools.bench.trl_peer import run_peer

__all__ = [
    "CASES",
    "CPU_SIZES",
    "FINETUNING_CASES",
    "SHAPES",
    "Case",
    "FinetuningCase",
    "Machine",
    "beside_line",
    "finetuning_table",
    "growth_plot",
    "lengths_plot",
    "lengths_table",
    "make_random_model",
    "measure_machine",
    "profile_table",
    "run_beside",
    "run_case",
    "run_finetuning_case",
    "run_generation_peer",
    "run_lengths",
    "run_peer",
    "run_scaling",
    "scaling_table",
    "table",
]
