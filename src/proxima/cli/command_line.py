"""The command line: from flags and YAML to one of `proxima.cli.commands`, which it runs; one-line errors,
exit codes.

Flags are made by tyro from the dataclasses themselves. `--config FILE.yaml` gives them new defaults; flags
win.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import re
import shutil
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, NoReturn, get_args, get_type_hints

from proxima import __version__
from proxima.cli.command import Command
from proxima.cli.commands import COMMANDS
from proxima.config import (
    FinetuningConfig,
    PPOConfig,
    RewardConfig,
    RewardSpec,
    Settings,
    Values,
    check_value,
    checked,
    declarations,
    former_names,
    preset_values,
    read_yaml,
    shareable,
    warn_renamed,
)
from proxima.core.errors import EngineFailure, Interrupted, ProcessLost, RewardFailure
from proxima.core.terminal_text import stderr_handler, visible
from proxima.runs import noting_command
from proxima.runtime.distributed import end_process, rank_and_count

if TYPE_CHECKING:
    from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

CONFIGS: dict[str, type[Settings]] = {
    "ppo": PPOConfig,
    "finetuning": FinetuningConfig,
    "reward_training": RewardConfig,
}
KNOWN_ERRORS = (ValueError, OSError, MemoryError, RewardFailure, EngineFailure, ProcessLost)
SHORT = {"model": "model-name", "from": "from-run", "continue": "continue-from"}
SHORT_FLAGS = re.compile(rf"^--({'|'.join(SHORT)})(?==|$)")
GENERAL = "--config FILE.yaml gives every flag a new default; --debug shows tracebacks."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command.

    An error that the user can correct is one line on stderr and exit code 2, an unexpected one is exit code
    1; `--debug` shows the traceback instead.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a letter that the terminal's encoding lacks, or half a one, stops nothing
        sys.stdout.reconfigure(errors="backslashreplace")
    debug = "--debug" in given
    is_main = rank_and_count()[0] == 0
    try:
        with nullcontext() if debug else _short_warnings(), _safe_log():
            try:
                _run([argument for argument in given if argument != "--debug"])
            finally:
                sys.stdout.flush()
        if arguments is None and rank_and_count()[1] > 1:
            end_process()
    except BrokenPipeError:  # who read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except Interrupted as stop:
        if is_main:
            print(f"proxima: {visible(str(stop))}", file=sys.stderr)
        raise SystemExit(stop.exit_code) from None
    except KeyboardInterrupt:
        print("proxima: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if debug:
            raise
        raise SystemExit(_report(error, is_main)) from None


def _report(error: Exception, is_main: bool) -> int:
    """Print an error as one line; its exit code."""
    if _is_an_interrupt(error):
        print("proxima: interrupted", file=sys.stderr)
        return 130
    on_all = getattr(error, "shared", False) or isinstance(error, (RewardFailure, EngineFailure))
    if on_all and not is_main:
        _leave_silently()
    known = isinstance(error, KNOWN_ERRORS)
    reason = " ".join(str(error).split()) or type(error).__name__
    hint = "" if known else f" (an unexpected {type(error).__name__}; --debug shows the traceback)"
    print(f"proxima: {visible(shareable(reason))}{hint}", file=sys.stderr)
    return 2 if known else 1


def _is_an_interrupt(error: BaseException | None) -> bool:
    """Whether an error was raised on the way out of Ctrl-C, as Python's import lock does now and then."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False


def _run(arguments: Sequence[str]) -> None:
    rank, count = rank_and_count()
    with (
        _silence() if rank else nullcontext()
    ):  # all read the same arguments: the main process reports errors
        if count > 1 and arguments[:1] != ["train"]:
            raise ValueError(
                f"only `proxima train` can use several processes; start {' '.join(arguments[:1])} without "
                "torchrun"
            )
        command = parse(arguments)
    try:
        with _quiet() if rank else nullcontext(), noting_command(_as_given(arguments, count)):
            command.run()
    finally:
        sys.stdout.flush()


def _as_given(arguments: Sequence[str], count: int) -> list[str]:
    """The command line as it was typed; of torchrun's own flags only the number of processes is known."""
    several = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", str(count)), "-m"]
    return [*(several if count > 1 else []), "proxima", *arguments]


@contextmanager
def _silence() -> Iterator[None]:
    with _quiet(), open(os.devnull, "w") as nothing, redirect_stderr(nothing):
        try:
            yield
        except ValueError:
            _leave_silently()


def _leave_silently() -> NoReturn:
    """The main process reports the error; torchrun would stop it as soon as another process has gone."""
    time.sleep(10)
    raise SystemExit(2)


@contextmanager
def _quiet() -> Iterator[None]:
    """Of several processes only the main process prints and warns."""
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Warnings in one line, without the place in the code."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *place, **more: f"proxima: {visible(shareable(str(message)))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def _safe_log() -> Iterator[None]:
    """Warnings of the package, without what steers a terminal."""
    logger = logging.getLogger("proxima")
    if logger.hasHandlers():
        yield
        return
    handler = stderr_handler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def parse(arguments: Sequence[str]) -> Command:
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
    after = ", after `proxima data sample my-data`" if "my-data" in kind.example else ""
    rest, values = _take_config(_with_flags(kind, rest))
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_reward_rule)
    try:
        command = tyro.cli(
            kind,
            args=rest,
            prog=f"proxima {name}",
            description=f"{kind.purpose()}\n\nFor example{after}: {kind.example}\n\n{GENERAL}",
            default=_defaults(kind, _preset_of(kind, rest, values) | values),
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            registry=registry,
        )
    except _Unusable as error:
        raise ValueError(str(error)) from None
    for flag, declared in declarations(kind).items():
        check_value(flag, getattr(command, flag), declared)
    return command


def overview() -> str:
    width = shutil.get_terminal_size().columns
    rows = "\n".join(
        textwrap.fill(f"  {name:13} {kind.purpose()}", width, subsequent_indent=" " * 16)
        for name, kind in COMMANDS.items()
    )
    return (
        f"Proxima {__version__}: PPO fine-tuning of language models with human feedback.\n\n"
        f"usage: proxima COMMAND [flags]\n\n{rows}\n\n"
        "`proxima COMMAND --help` lists its flags; `proxima demo` is the place to start."
    )


def _with_flags(kind: type[Command], arguments: list[str]) -> list[str]:
    """Leading words with the flags that the command names for them (`proxima eval RUN`), and the other words.

    Some flags have a short name (`SHORT`): `--model` is `--model-name`.
    """
    named: list[str] = []
    for flag in kind.words:
        if arguments and not arguments[0].startswith("-"):
            named += [f"--{flag.removesuffix('...')}", arguments.pop(0)]
        while flag.endswith("...") and arguments and not arguments[0].startswith("-"):
            named.append(arguments.pop(0))
    words = [re.sub(SHORT_FLAGS, lambda found: f"--{SHORT[found[1]]}", word) for word in arguments]
    return named + [_present_flag(word, kind) for word in words]


def _present_flag(word: str, kind: type[Command]) -> str:
    """A flag by its present name, with a line on stderr where it was given by a former one."""
    flag = re.fullmatch(r"--(no-)?([a-z][a-z0-9_-]*)(=.*)?", word, re.S)
    if flag is None:
        return word
    name = flag[2].replace("-", "_")
    for config in _configs_of(kind):
        if new := former_names(CONFIGS[config]).get(name):
            warn_renamed(name, new, FutureWarning, 2)
            return f"--{flag[1] or ''}{new.replace('_', '-')}{flag[3] or ''}"
    return word


def _configs_of(kind: type[Command]) -> list[str]:
    """The fields of a command whose settings are flags of it."""
    return [field.name for field in _fields(kind) if field.name in CONFIGS]


def _fields(kind: type[Command]) -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(kind)  # type: ignore[arg-type]


def _take_config(arguments: list[str]) -> tuple[list[str], Values]:
    """Cut `--config FILE` (or `--config=FILE`) out of the arguments and read the file."""
    rest: list[str] = []
    values: Values = {}
    pending = iter(arguments)
    for argument in pending:
        if argument == "--config" or argument.startswith("--config="):
            path = argument.partition("=")[2] or next(pending, "")
            if not path:
                raise ValueError("--config needs a file")
            values |= _settings(path, arguments)
        else:
            rest.append(argument)
    return rest, values


def _settings(path: str, arguments: Sequence[str]) -> Values:
    """What a settings file holds.

    Other people's code is never run because a file says so: that needs the flag.
    """
    values = read_yaml(path)
    allowed = {"--trust-remote-code", "--trust_remote_code"} & set(arguments)
    if values.get("trust_remote_code") and not allowed:
        raise ValueError(
            f"{path} asks for trust_remote_code, which only the command line may allow: add "
            "--trust-remote-code, or take "
            "the line out"
        )
    return {name: value for name, value in values.items() if name != "trust_remote_code" or not allowed}


def _preset_of(kind: type[Command], arguments: Sequence[str], values: Values) -> Values:
    """The settings of the preset that a flag or else the settings file names, where the command takes one."""
    if not any(field.name == "preset" for field in _fields(kind)):
        return {}
    name = values.get("preset", "")
    for word, after in pairwise([*arguments, ""]):
        if word == "--preset" or word.startswith("--preset="):
            name = word.partition("=")[2] if "=" in word else after
    return preset_values(name) if name else {}


def _defaults(kind: type[Command], values: Values) -> Command:
    """The command with its defaults; a YAML file may set the command's own flags and settings alike."""
    import tyro

    own: Values = {}
    hints = get_type_hints(kind)
    for field in _fields(kind):
        if field.name in CONFIGS:
            continue
        if field.name in values:
            own[field.name] = _in_type(field.name, values.pop(field.name), hints[field.name])
        elif field.default is dataclasses.MISSING:
            own[field.name] = tyro.MISSING
    for config in _configs_of(kind):
        own[config] = CONFIGS[config].from_dict(values)
        values = {}
    if values:
        raise ValueError(f"unknown setting {sorted(values)[0]!r} for this command")
    return kind(**own)


def _in_type(name: str, value: object, kind: object) -> object:
    """A value from YAML for one of a command's own flags."""
    if kind is RewardSpec:
        return RewardSpec.of(value)
    if NoneType in get_args(kind):
        return None if value is None else _in_type(name, value, get_args(kind)[0])
    return Path(checked(name, value, str)) if kind is Path else checked(name, value, kind)


class _Unusable(Exception):  # noqa: N818
    """A value that tyro must not report: it would repeat the word, which may hold a key."""


def _reward(word: str) -> RewardSpec:
    try:
        return RewardSpec.of(word)
    except ValueError as error:
        raise _Unusable(str(error)) from None


def _reward_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[RewardSpec] | None:
    """On the command line a reward is one word."""
    import tyro

    if info.type is not RewardSpec:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="[WEIGHT*]SOURCE[,KEY=VALUE...]",
        instance_from_str=lambda words: _reward(words[0]),
        is_instance=lambda value: isinstance(value, RewardSpec),
        str_from_instance=lambda spec: [spec.to_text()],
    )
