"""The commands of `proxima`, one dataclass each: its fields are the flags, its docstring the help, `run()`
does it.

In: flags, parsed by `cli`. Out: what the command prints and writes. What is heavy is imported inside `run`:
    `--help` is quick.
"""

from typing import Any

from proxima.cli.bench_command import Bench
from proxima.cli.compare_command import Compare
from proxima.cli.data_command import Data
from proxima.cli.demo_command import Demo
from proxima.cli.doctor_command import Doctor
from proxima.cli.eval_command import Eval
from proxima.cli.export_command import Export
from proxima.cli.finetuning_commands import Reward, Sft
from proxima.cli.generate_command import Generate
from proxima.cli.label_command import Label
from proxima.cli.migrate_command import Migrate
from proxima.cli.report_command import Report
from proxima.cli.scaling_command import Scaling
from proxima.cli.serve_reward_command import ServeReward
from proxima.cli.studio_command import Studio
from proxima.cli.train_command import Train

COMMANDS: dict[str, Any] = {
    "demo": Demo,
    "data": Data,
    "sft": Sft,
    "label": Label,
    "reward": Reward,
    "train": Train,
    "doctor": Doctor,
    "eval": Eval,
    "report": Report,
    "compare": Compare,
    "generate": Generate,
    "export": Export,
    "serve-reward": ServeReward,
    "studio": Studio,
    "bench": Bench,
    "scaling": Scaling,
    "migrate": Migrate,
}
"""By name, in the order of the help."""
