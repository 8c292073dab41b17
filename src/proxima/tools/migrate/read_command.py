"""TRL's settings given outside a script. In: a shell script or a YAML file. Out: `OldRun`.

accelerate launch --num_processes 4 examples/scripts/ppo/ppo_tldr.py --learning_rate 3e-6
--missing_eos_penalty 1.0
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from proxima.config import read_yaml
from proxima.tools.migrate.old_run import UNREAD, OldRun, Setting
from proxima.tools.migrate.trl_settings import KNOWN

OTHERS = ("grpo", "dpo", "rloo", "kto", "sft", "reward", "gkd", "bco", "cpo", "orpo", "prm", "xpo")
COUNTS = ("num_processes", "nproc_per_node")
WORDS = {"true": True, "false": False, "none": None, "null": None}
NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
Flag = tuple[str, list[str], int]  # name, values, line


def read_yaml_settings(path: Path) -> OldRun:
    """A file as `--config` of TRL's scripts takes it."""
    run = OldRun(path.name, outside=True)
    put_all(run, read_yaml(path), path.name)
    if not run.settings:
        raise ValueError(f"{path.name} holds no setting of TRL's PPO")
    return run


def put_all(run: OldRun, values: dict[str, object], where: str) -> None:
    for name, value in values.items():
        if name == "env":
            run.unread.append(f"env ({where}): set environment variables yourself")
        else:
            run.put(name, Setting(plain(value) if isinstance(value, str) else value, where))


def read_shell(text: str, path: Path) -> OldRun:
    """Read the one command of a shell script that starts a PPO script."""
    command = _ppo_command(text, path)
    run = OldRun(path.name, outside=True)
    read_launch(run, command)
    for name, values, line in flags_of(command):
        where = f"line {line}"
        if name == "config" and values:
            read_settings_file(run, path, values[0], where)
    for name, values, line in flags_of(command):
        if name != "config":
            run.put(*setting_of(name, values, f"line {line}"))
    return run


def _ppo_command(text: str, path: Path) -> Words:
    commands = [command for command in split_commands(text, path.name) if start_of_flags(command) is not None]
    named = [command for command in commands if "ppo" in Path(program(command)).name]
    chosen = named or [
        command for command in commands if any(name in KNOWN for name, _, _ in flags_of(command))
    ]
    if not named and (other := [item for item in commands if any(word in kind(item) for word in OTHERS)]):
        raise ValueError(
            f"{path.name}, line {other[0][0][1]}: `{kind(other[0])}` is not PPO; only PPO can be migrated"
        )
    if not chosen:
        raise ValueError(
            f"{path.name} starts no PPO script of TRL (accelerate launch .../ppo.py --flag value ...)"
        )
    if len(chosen) > 1:
        lines = ", ".join(str(command[0][1]) for command in chosen)
        raise ValueError(
            f"{path.name} starts {len(chosen)} PPO runs (lines {lines}); leave the one to migrate"
        )
    return chosen[0]


def read_settings_file(run: OldRun, path: Path, name: str, where: str) -> None:
    """The YAML file behind `--config`, from the working folder or beside the script."""
    found = next((place for place in (Path(name), path.parent / name) if place.is_file()), None)
    if found is None:
        run.unread.append(f"--config {name} ({where}): there is no such file here; its settings are not read")
    else:
        put_all(run, read_yaml(found), found.name)


Words = list[tuple[str, int]]  # with their lines


def split_commands(text: str, name: str) -> list[Words]:
    """Commands as words; continued lines are joined, variables set to plain text are filled in."""
    commands: list[Words] = []
    variables: dict[str, str] = {}
    pending: Words = []
    for number, line in enumerate(text.splitlines(), 1):
        continued = line.rstrip().endswith("\\")
        lexer = shlex.shlex(
            line.rstrip().removesuffix("\\") if continued else line, posix=True, punctuation_chars=";&|<>"
        )
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            raise ValueError(
                f"{name}, line {number}: a quote is not closed; write the command's values on one line each"
            ) from None
        for word in words:
            if word and set(word) <= set(";&|<>"):
                commands, pending = [*commands, pending], []
            else:
                pending.append((filled(word, variables), number))
        if not continued:
            for word, _ in pending if len(pending) == 1 or (pending and pending[0][0] == "export") else []:
                if assigned := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word):
                    variables[assigned[1]] = assigned[2]
            commands, pending = [*commands, pending], []
    return [command for command in [*commands, pending] if command]


def filled(word: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: variables.get(found[1] or found[2], found[0]), word)


def start_of_flags(command: Words) -> int | None:
    """Where the words after the Python script begin; also after `trl COMMAND`."""
    for place, (word, _) in enumerate(command):
        if word.endswith(".py"):
            return place + 1
        if word == "trl" and len(command) > place + 1:
            return place + 2
    return None


def program(command: Words) -> str:
    start = start_of_flags(command)
    return command[start - 1][0] if start else ""


def kind(command: Words) -> str:
    """`trl grpo` or `dpo.py`."""
    start = start_of_flags(command) or 1
    before = "trl " if start > 1 and command[start - 2][0] == "trl" else ""
    return before + Path(program(command)).name


def flags_of(command: Words) -> list[Flag]:
    return flags_in(command[start_of_flags(command) or 0 :])


def flags_in(words: Words) -> list[Flag]:
    found: list[Flag] = []
    for word, line in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.append((name.replace("-", "_"), [value] if equals else [], line))
        elif found:
            found[-1][1].append(word)
    return found


def read_launch(run: OldRun, command: Words) -> None:
    """How many processes accelerate or torchrun started."""
    for name, values, line in flags_in(command[: (start_of_flags(command) or 1) - 1]):
        if name in COUNTS and values and values[0].isdecimal() and len(values[0]) < 6:
            run.processes = int(values[0])
        elif name == "config_file" and values:
            run.unread.append(
                f"--config_file {values[0]} (line {line}): the number of processes in it is not read; give "
                "--processes"
            )


def setting_of(name: str, values: list[str], where: str) -> tuple[str, Setting]:
    """A flag as transformers' parser reads it: true without a value; `--no_x` is x = false."""
    if name not in KNOWN and name.startswith("no_") and name[3:] in KNOWN and not values:
        return name[3:], Setting(False, where)
    if any("$" in value or "`" in value for value in values):
        return name, Setting(UNREAD, where, " ".join(values)[:60])
    read = [plain(value) for value in values]
    return name, Setting(True if not read else read[0] if len(read) == 1 else read, where)


def plain(text: str) -> object:
    """The value that a word stands for."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if not NUMBER.fullmatch(text) or len(text) > 40:
        return text
    return float(text) if re.search(r"[.eE]", text) else int(text)
