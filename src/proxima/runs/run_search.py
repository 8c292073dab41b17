"""Finds the runs under a folder, a few levels deep. In: runs/. Out: a `Run` for each, the newest first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from proxima.runs.run_reader import Run

MARKS = ("config.yaml", "metrics.jsonl", ".lock", "sft.json", "reward.json")  # any makes a folder a run
DEPTH = 3  # runs/NAME, and runs in runs: runs/demo/ppo, runs/learn/seed-0/ppo


def find_runs(folder: str | Path) -> list[Run]:
    """Runs are named by their path below the folder. Those with broken files are included."""
    home = Path(folder)
    found = []
    for path in _folders(home, DEPTH):
        with suppress(ValueError):  # removed since
            found.append(Run(path, path.relative_to(home).as_posix()))
    return sorted(found, key=lambda run: run.changed, reverse=True)


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = [
            entry
            for entry in os.scandir(folder)
            if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."
        ]
    except OSError:
        return
    for entry in entries:
        path = Path(entry.path)
        if any((path / mark).exists() for mark in MARKS):
            yield path
        elif depth > 1:
            yield from _folders(path, depth - 1)
