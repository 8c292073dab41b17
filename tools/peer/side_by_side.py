"""Runs jobs of a module, each in a process of its own with its log and its result.

In: the arguments of each job, one of them the folder of the results. Out: what is missing, and why. A job
whose result is there already is not repeated, so that the same command continues what was cut off.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from proxima.runs import write_json

OF_ALL = ("do", "out", "together", "limit", "seeds", "data", "model", "instruct", "hh")
"""Arguments that are not a job's: of the whole comparison, and of preparing it."""
LOOK = 0.2  # seconds between looks at the processes


def add_limits(parser: argparse.ArgumentParser, together: int) -> None:
    parser.add_argument("--together", type=int, default=together, help="most jobs at the same time")
    parser.add_argument(
        "--alone",
        choices=("yes", "no"),
        default="yes",
        help="whether the first job of each side runs alone, for its seconds",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=540,
        help="seconds after which jobs are stopped; start again to continue",
    )


@dataclass(frozen=True)
class Job:
    """One process: `python -m MODULE DO --flags`, and the result that it writes."""

    name: str
    args: argparse.Namespace
    reads: tuple[str, ...]  # files in the folder that the result depends on

    @property
    def result(self) -> Path:
        return Path(self.args.out) / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return self.result.with_suffix(".log")

    @cached_property
    def settings(self) -> dict[str, str]:
        """What the result depends on."""
        files = {name: digest(self.args.out / name) for name in self.reads}
        return {**self.given, **files}

    @property
    def given(self) -> dict[str, str]:
        return {name: str(value) for name, value in vars(self.args).items() if name not in OF_ALL}

    def write(self, found: dict[str, Any]) -> None:
        write_json(self.result, {**found, "settings": self.settings})

    def is_complete(self) -> bool:
        """A ValueError where the result is that of other settings."""
        if not self.result.is_file():
            return False
        before = json.loads(self.result.read_text(encoding="utf-8"))["settings"]
        for name, value in self.settings.items():
            if before.get(name) != value:
                raise ValueError(
                    f"{self.result} was made with {name} {before.get(name)}, now it is {value}; give another "
                    "--out, or remove the file"
                )
        return True

    def start(self, module: str, threads: int) -> subprocess.Popen[bytes]:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.given.items()]
        command = [sys.executable, "-m", module, self.args.do, f"--out={self.args.out}", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with self.log.open("w") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


@cache
def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def run_jobs(module: str, jobs: Sequence[Job], together: int, ends: float) -> list[str]:
    """
    Args:
        together: most jobs at the same time; they share the processor's cores.
        ends: by `time.monotonic`; what still runs then is stopped.

    Returns:
        One sentence for each job that has no result.
    """
    waiting, missing = [job for job in jobs if not job.is_complete()], []
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    threads = max(1, (os.cpu_count() or 1) // together)
    try:
        while (waiting or running) and time.monotonic() < ends:
            while waiting and len(running) < together:
                job = waiting.pop(0)
                running[job.name] = (job, job.start(module, threads))
            time.sleep(LOOK)
            for job, process in list(running.values()):
                if process.poll() is not None:
                    del running[job.name]
                    if process.returncode:
                        missing.append(f"{job.name} failed; its log ends with\n{job.log.read_text()[-1000:]}")
    finally:
        for _, process in running.values():
            process.kill()
            process.wait()
    return [
        *missing,
        *(f"{name} was stopped at the time limit" for name in running),
        *(f"{job.name} was not begun" for job in waiting),
    ]


def run_all(
    module: str,
    args: argparse.Namespace,
    alone: Sequence[Job],
    others: Sequence[Job],
    report: Callable[[Path], None],
) -> None:
    """Those that are timed one after the other, then the others beside each other; or all beside each other,
    where none is to be timed (`--alone no`). Then the report of what is there. Exits with what is missing, if
    anything is."""
    ends = time.monotonic() + args.limit
    if args.alone == "no":
        alone, others = (), (*alone, *others)
    try:
        missing = run_jobs(module, alone, 1, ends) + run_jobs(module, others, args.together, ends)
    except ValueError as error:
        sys.exit(str(error))
    report(args.out)
    if missing:
        sys.exit("\n".join([*missing, "the same command continues"]))
