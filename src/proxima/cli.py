"""The command line. In: flags or YAML. Out: one of `proxima.commands`, run.

Flags are made by tyro from the dataclasses themselves. `--config FILE.yaml` gives them new defaults; flags win.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxima import __version__
from proxima.commands import COMMANDS
from proxima.config import PPOConfig, RewardSpec, StageConfig
from proxima.config.settings import read_yaml
from proxima.errors import Interrupted, RewardFailure

CONFIGS: dict[str, Any] = {"ppo": PPOConfig, "stage": StageConfig}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. What the user can mend is one line on stderr and exit code 2; `--debug` shows the traceback too."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        parse([argument for argument in given if argument != "--debug"]).run()
    except (ValueError, OSError, MemoryError, RewardFailure) as error:
        if debug:
            raise
        print(f"proxima: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Interrupted as stop:
        print(f"proxima: {stop}", file=sys.stderr)
        raise SystemExit(stop.exit_code) from None
    except KeyboardInterrupt:
        print("proxima: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def parse(arguments: Sequence[str]) -> Any:
    """The command that these arguments describe, ready to run."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        raise SystemExit(0)
    name, *rest = arguments
    if name == "--version":
        print(f"proxima {__version__}")
        raise SystemExit(0)
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}; the commands are {', '.join(COMMANDS)}")
    import tyro

    kind = COMMANDS[name]
    rest, values = _take_config(_with_flags(kind, rest))
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_reward_rule)
    return tyro.cli(
        kind,
        args=rest,
        prog=f"proxima {name}",
        description=f"{kind.__doc__}\n\n--config FILE.yaml gives every flag a new default; --debug shows tracebacks.",
        default=_defaults(kind, values),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        registry=registry,
    )


def overview() -> str:
    rows = "\n".join(f"  {name:13} {kind.__doc__}" for name, kind in COMMANDS.items())
    return (
        f"Proxima {__version__}: PPO fine-tuning of language models with human feedback.\n\n"
        f"usage: proxima COMMAND [flags]\n\n{rows}\n\n"
        "`proxima COMMAND --help` lists its flags; `proxima demo` is the place to start."
    )


def _with_flags(kind: Any, arguments: list[str]) -> list[str]:
    """Leading words get the flags the command names for them (`proxima eval RUN`); `--model` is short for `--model-name`."""
    named: list[str] = []
    for flag in getattr(kind, "words", ()):
        if arguments and not arguments[0].startswith("-"):
            named += [f"--{flag}", arguments.pop(0)]
    return named + [re.sub(r"^--model(?==|$)", "--model-name", word) for word in arguments]


def _take_config(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Cut `--config FILE` (or `--config=FILE`) out of the arguments and read the file."""
    rest: list[str] = []
    values: dict[str, Any] = {}
    pending = iter(arguments)
    for argument in pending:
        if argument == "--config" or argument.startswith("--config="):
            path = argument.partition("=")[2] or next(pending, "")
            if not path:
                raise ValueError("--config needs a file")
            values |= read_yaml(path)
        else:
            rest.append(argument)
    return rest, values


def _defaults(kind: Any, values: dict[str, Any]) -> Any:
    """The command with its defaults; a YAML file may set the command's own flags and those of `PPOConfig` alike."""
    import tyro

    own: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in CONFIGS:
            continue
        if field.name in values:
            value = values.pop(field.name)
            own[field.name] = Path(value) if "Path" in str(field.type) and value is not None else value
        elif field.default is dataclasses.MISSING:
            own[field.name] = tyro.MISSING
    for field in dataclasses.fields(kind):
        if field.name in CONFIGS:
            own[field.name] = CONFIGS[field.name].from_dict(values)
            values = {}
    if values:
        raise ValueError(f"unknown setting {sorted(values)[0]!r} for this command")
    return kind(**own)


def _reward_rule(info: Any) -> Any:
    """On the command line a reward is one word."""
    import tyro

    if info.type is not RewardSpec:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="[WEIGHT*]SOURCE[,KEY=VALUE...]",
        instance_from_str=lambda words: RewardSpec.of(words[0]),
        is_instance=lambda value: isinstance(value, RewardSpec),
        str_from_instance=lambda spec: [spec.to_text()],
    )
