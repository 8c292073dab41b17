"""The commands of `proxima`, one dataclass each: its fields are the flags, its docstring the help, `run()` does it.

In: flags, parsed by `cli`. Out: what the command prints and writes. What is heavy is imported inside `run`: `--help` is quick.
"""

from typing import Any

from proxima.commands.bench import Bench
from proxima.commands.compare import Compare
from proxima.commands.data import Data
from proxima.commands.demo import Demo
from proxima.commands.doctor import Doctor
from proxima.commands.evaluate import Eval
from proxima.commands.export import Export
from proxima.commands.generate import Generate
from proxima.commands.label import Label
from proxima.commands.migrate import Migrate
from proxima.commands.report import Report
from proxima.commands.scaling import Scaling
from proxima.commands.serve_reward import ServeReward
from proxima.commands.stages import Reward, Sft
from proxima.commands.studio import Studio
from proxima.commands.train import Train

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
