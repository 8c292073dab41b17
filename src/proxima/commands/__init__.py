"""The commands of `proxima`, one dataclass each: its fields are the flags, its docstring the help, `run()` does it.

What is heavy is imported inside `run`, so that `--help` is quick.
"""

from typing import Any

from proxima.commands.demo import Demo
from proxima.commands.generate import Generate
from proxima.commands.label import Label
from proxima.commands.stages import Reward, Sft
from proxima.commands.train import Train

COMMANDS: dict[str, Any] = {
    "demo": Demo,
    "sft": Sft,
    "label": Label,
    "reward": Reward,
    "train": Train,
    "generate": Generate,
}
"""By name, in the order of the help."""
