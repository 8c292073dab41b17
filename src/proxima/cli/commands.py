"""The registry of `proxima`'s commands.

Each command is a dataclass in a module of its own; `proxima.cli.command` says what it has to have. Heavy
packages are imported inside `run`, so that `--help` is quick.
"""

from proxima.cli.bench_command import Bench
from proxima.cli.command import Command
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
from proxima.cli.replay_command import Replay
from proxima.cli.report_command import Report
from proxima.cli.scaling_command import Scaling
from proxima.cli.serve_reward_command import ServeReward
from proxima.cli.studio_command import Studio
from proxima.cli.train_command import Train

COMMANDS: dict[str, type[Command]] = {
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
    "replay": Replay,
    "generate": Generate,
    "export": Export,
    "serve-reward": ServeReward,
    "studio": Studio,
    "bench": Bench,
    "scaling": Scaling,
    "migrate": Migrate,
}
"""By name, in the order of the help."""
