"""Runs several commands at the same time, each with its log."""

import subprocess
import sys
from pathlib import Path


def run_together(module: str, jobs: dict[Path, list[str]]) -> None:
    """Run `python -m module ARGUMENTS` for every job; once all have ended, stop where one has failed.

    Args:
        jobs: arguments, by the file that takes the output.
    """
    started = {}
    for path, arguments in jobs.items():
        with path.open("w") as log:
            command = [sys.executable, "-m", module, *arguments]
            started[path] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    failed = [path for path, process in started.items() if process.wait()]
    if failed:
        names = ", ".join(path.name for path in failed)
        raise SystemExit(f"failed: {names}; the first ends with\n{failed[0].read_text()[-2000:]}")
