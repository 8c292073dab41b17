"""A Python function as a reward: called with what its parameters name, tried again where it fails.

`f(prompts, completions)`, and any of `completion_ids`, `ended`, `turns`, a column of the data set, an option
of the spec; `async def` is awaited. It returns one number per sequence, or a list of one number per token.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from proxima.config import RewardSpec
from proxima.core.json_record import Record
from proxima.rewards.coroutines import run_async
from proxima.rewards.reward_options import check_options, typed
from proxima.rewards.reward_outcome import RewardOutcome, read_rewards
from proxima.rewards.reward_samples import Samples, columns_of

TURNS = "turns"
"""The parameter that gets what was said, turn by turn; a column or an option of this name goes before."""
OWN = ("prompts", "completions", "completion_ids", "ended", TURNS)
"""Parameters that are filled from `Samples`; all others are options or columns."""
ENVIRONMENTS = "environments"
"""The parameter that `EpisodeFunction` fills; without an environment it is a column like others."""


class FunctionReward:
    """Calls a function with what its parameters name."""

    attempts = 2
    lacks_unit = False
    filled: tuple[str, ...] = OWN
    """Parameters that are neither options nor columns."""

    def __init__(self, spec: RewardSpec, function: Callable[..., object]):
        self.function = function
        self.label = spec.label
        parameters = parameters_of(function)
        self.positional, taken = _by_position(spec, parameters)
        asked = {
            p.name: p
            for p in parameters
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in taken
        }
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.own = [name for name in OWN if name in asked and not (name == TURNS and name in spec.options)]
        filled = [name for name in self.filled if name != TURNS or name in self.own]
        others = [name for name in asked if name not in filled]
        self.options = check_options(spec, typed(function, others), self.takes_any)
        columns = [name for name in others if name not in self.options]
        self.needed = [name for name in columns if asked[name].default is inspect.Parameter.empty]
        self.optional = [name for name in columns if name not in self.needed]
        self.reserved = {*filled, *taken}

    def check(self, prompts: Sequence[str], first: int = 0) -> None:
        """Raise a ValueError that names the column where one that the function takes is missing."""
        for name in self.needed + self.optional:
            missing = [i for i, prompt in enumerate(prompts) if name not in columns_of(prompt)]
            if missing and (name in self.needed or len(missing) < len(prompts)):
                row = missing[0]
                have = ", ".join(sorted(columns_of(prompts[row]))) or "none"
                or_else = ", or set `environment`" if name == ENVIRONMENTS else ""
                raise ValueError(
                    f"the reward {self.label!r} asks for {name!r}, but the columns of prompt {first + row} "
                    f"({prompts[row][:40]!r}) are: {have}; add the column to the data, or the option "
                    f"{name} to the reward{or_else}"
                )

    def __call__(self, samples: Samples) -> RewardOutcome:
        return self.in_process(samples)

    def in_process(self, samples: Samples) -> RewardOutcome:
        """One call for all samples, in this process."""
        positional, named = self.arguments(samples)
        returned = self.function(*positional, **named)
        if inspect.isawaitable(returned):
            returned = run_async(returned)
        return read_rewards(returned, samples.lengths)

    def arguments(self, samples: Samples) -> tuple[Sequence[object], Record]:
        """What the function is called with, by position and by name."""
        named = self.needed + self.optional
        columns = samples.columns()
        wanted = {
            name: column
            for name, column in columns.items()
            if name in named or (self.takes_any and name not in self.reserved)
        }
        given = {
            name: columns[name] if name == TURNS and name in columns else _copied(getattr(samples, name))
            for name in self.own
        }
        positional = [_copied(getattr(samples, name)) for name in self.positional]
        return positional, {**wanted, **given, **self.options}


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # some builtins have no signature
        return [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]


def _copied(items: Sequence[object]) -> list[object]:
    """A copy that the function may change without changing anything else."""
    return [_copied(item) if isinstance(item, list) else copy.copy(item) for item in items]


def _by_position(spec: RewardSpec, parameters: list[inspect.Parameter]) -> tuple[tuple[str, ...], list[str]]:
    """The arguments that are passed by position, and the parameters that take them.

    Prompts and completions come first, whatever the parameters are called. A function that names
    `completions` at another place, or `environments` at one of these, gets everything by name.
    """
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    by_name = "completions" in [p.name for p in parameters] and names[1:2] != ["completions"]
    if by_name or ENVIRONMENTS in names[:2]:
        return (), []
    if len(names) < 2 and not any_number:
        raise ValueError(
            f"the reward {spec.label!r} must take (prompts, completions), it takes ({', '.join(names)})"
        )
    return ("prompts", "completions"), names[:2]


def load_function(source: str, what: str = "reward") -> Callable[..., object]:
    """`module:function`, imported from the Python path or the current folder.

    Args:
        what: it is, for the errors.
    """
    module_name, _, function_name = source.partition(":")
    if module_name.endswith(".py"):
        name = Path(module_name).stem
        raise ValueError(
            f"the {what} {source!r} names a file; write {name}:{function_name}, and run where {name}.py lies"
        )
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"cannot load the {what} {source!r}: {reason}; give module:function, from the current folder too"
        ) from error
    finally:
        sys.path.remove(here)
    if not callable(function):
        raise ValueError(f"the {what} {source!r} is a {type(function).__name__}, not a function")
    return function
