"""What made a run: the command line, and what the doctor said. In: what a command notes while it works. Out:
`origin.json` in every run folder that is made meanwhile, `doctor.json` where `proxima doctor` was given the
run's name; a command line that resumes the run.

Keys in the command line are not written down.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

from proxima.config import shareable, shareable_words
from proxima.core.json_record import Record
from proxima.core.regular_files import read_file
from proxima.runs.run_files import write_json

ORIGIN, DOCTOR = "origin.json", "doctor.json"
Kind = Literal["ppo", "sft", "reward"]
CHECK_KEYS = ("level", "name", "text", "advice")

_noted: ContextVar[Record | None] = ContextVar("noted", default=None)


@contextmanager
def noting_command(words: Sequence[str]) -> Iterator[None]:
    """Runs that begin in this block were made by these words of a command line."""
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        folder = ""
    token = _noted.set({"command": shareable_words(words), "folder": folder})
    try:
        yield
    finally:
        _noted.reset(token)


def note_checks(findings: Iterable[Mapping[str, str]]) -> None:
    """What was found before the run that comes: level, name, text, advice."""
    if (noted := _noted.get()) is not None:
        noted["checks"] = _without_keys(findings)


def write_examination(folder: Path, how: str, findings: Iterable[Mapping[str, str]]) -> None:
    """What `proxima doctor` found, into the folder of a run that may not have begun; `how` (its flags) names
    the earlier examination that it replaces."""
    folder.mkdir(parents=True, exist_ok=True)
    earlier = [each for each in read_examinations(folder) if each["how"] != how]
    write_json(folder / DOCTOR, [*earlier, {"how": how, "checks": _without_keys(findings)}])


def read_examinations(folder: Path) -> list[Record]:
    """As they were written, the newest last; of a file by another hand only what has its form."""
    found = _read(folder / DOCTOR)
    return [
        {"how": str(each.get("how", "")), "checks": _checks(each["checks"])}
        for each in (found if isinstance(found, list) else [])
        if isinstance(each, dict) and isinstance(each.get("checks"), list)
    ]


def write_origin(folder: Path, kind: Kind, resumed: bool = False) -> None:
    """Into a run folder; where a run is resumed, what began it stays (nothing, where it is older than this
    file)."""
    noted = _noted.get() or {}
    if resumed:
        before = read_origin(folder)
        later = [*before.get("resumed", []), noted.get("command", [])]
        write_json(folder / ORIGIN, {"kind": kind, **before, "resumed": [words for words in later if words]})
    else:
        write_json(folder / ORIGIN, {"kind": kind, **noted})


def read_origin(folder: Path) -> Record:
    """As it was written; of a file by another hand only what has its form."""
    found = _read(folder / ORIGIN)
    if not isinstance(found, dict):
        return {}
    kind = found.get("kind")
    checks = found.get("checks")
    resumed = found.get("resumed")
    read: Record = {"kind": kind} if kind in ("ppo", "sft", "reward") else {}
    if words := _words(found.get("command")):
        read |= {"command": words, "folder": str(found.get("folder", ""))}
    if isinstance(checks, list):
        read["checks"] = _checks(checks)
    if isinstance(resumed, list):
        read["resumed"] = [words for each in resumed if (words := _words(each))]
    return read


def _read(path: Path) -> object:
    """None where there is no file, or no JSON in it."""
    try:
        return json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None


def _without_keys(findings: Iterable[Mapping[str, str]]) -> list[Record]:
    return [{key: shareable(each[key]) for key in CHECK_KEYS} for each in findings]


def _checks(value: Iterable[object]) -> list[Record]:
    return [{key: str(each.get(key, "")) for key in CHECK_KEYS} for each in value if isinstance(each, dict)]


def _words(value: object) -> list[str]:
    """A command line of Proxima; none where it is one of something else, or holds what steers a terminal:
    people copy it. Keys that another hand wrote into it are hidden as ours are."""
    if not isinstance(value, list) or not all(isinstance(word, str) and word.isprintable() for word in value):
        return []
    torchrun = (
        value[:1] == ["torchrun"] and value[1:2] == ["--nproc-per-node"] and value[3:5] == ["-m", "proxima"]
    )
    return shareable_words(value) if value[:1] == ["proxima"] or torchrun else []


def resume_command(folder: Path) -> str:
    """The command that continues the PPO run in a folder; what it does not know is in capitals."""
    name, words = folder.resolve().name, read_origin(folder).get("command", [])
    if "train" not in words:
        words = ["proxima", "train", "--config", str(folder / "config.yaml"), "--data", "PROMPTS"]
        words += ["--run-dir", str(folder.parent)]
    kept = [word for word in words if word not in ("--resume", "--force")]
    named = any(word == "--run-name" or word.startswith("--run-name=") for word in kept)
    line = shlex.join([*kept, *([] if named else ["--run-name", name]), "--resume"])
    return line if line.isprintable() else ""
