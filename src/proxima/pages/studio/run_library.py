"""The runs of a folder, held open between requests; when a run counts as training, stalled or stopped. In:
runs/. Out: a run by its name, and a line for the list.

Only names found in the folder are accepted, so no path of a request reaches the disk. For the list, only the
last line and a few others of each run are read. The numbers of the runs viewed last stay in memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from proxima.core.json_record import Record
from proxima.pages.studio.sparkline import glance
from proxima.pages.web import Missing
from proxima.runs import Run, find_runs, title_of

KEPT = 8  # runs whose numbers stay in memory: about 60 MB each at 10,000 steps
QUIET = 60.0  # seconds without a new step after which a run that holds its lock is called stale ...
QUIET_STEPS = 10  # ... or this many times its last step's duration, whichever is longer
SHOWN = {  # metrics in the list of runs; the first is drawn
    "ppo": ("avg_reward", "kl"),
    "sft": ("validation_loss", "train_loss"),
    "reward": ("accuracy", "validation_loss"),
}
_number = count(1)


@dataclass
class Open:
    """A run that is being viewed; one request at a time reads from it."""

    run: Run
    lock: threading.Lock = field(default_factory=threading.Lock)
    number: int = field(default_factory=lambda: next(_number))

    @property
    def edition(self) -> str:
        """A new one means that earlier steps changed: the run was cut back, rolled back or started again."""
        return f"{self.number}.{self.run.version}"


class Library:
    """What a folder of runs holds now."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._open: OrderedDict[str, Open] = OrderedDict()
        self._listed: dict[str, Run] = {}
        self._lines: dict[str, tuple[object, Record]] = {}
        self._lock = threading.Lock()

    def list(self, seconds: float = 1.0) -> list[Record]:
        """One line per run, the newest first.

        Runs that cannot be read within `seconds` are marked `unread`; the next call reads them.
        """
        until = time.monotonic() + seconds
        found = [
            self._listed.get(run.name, run) for run in find_runs(self.folder)
        ]  # what was read once is kept
        lines: dict[str, Record] = {}
        new = 0
        for run in found:
            if run.name in self._lines or time.monotonic() < until or not new:
                new += run.name not in self._lines
                lines[run.name] = self._line(run)
            else:
                lines[run.name] = {"name": run.name, "changed": run.changed, "unread": True}
        self._listed = {run.name: run for run in found}
        self._lines = {name: line for name, line in self._lines.items() if name in lines}
        return [*lines.values()]

    @contextmanager
    def open(self, name: str) -> Iterator[Open]:
        """The run of this name, for one request at a time."""
        with self._lock:
            opened = self._open.get(name)
            if opened is None or not opened.run.path.is_dir():
                self._open.pop(name, None)
                run = next((run for run in find_runs(self.folder) if run.name == name), None)
                if run is None:
                    raise Missing(
                        f"there is no run {name!r} in {self.folder}; it may have been moved or removed"
                    )
                opened = self._open[name] = Open(run)
            self._open.move_to_end(name)
            while len(self._open) > KEPT:
                self._open.popitem(last=False)
        with opened.lock:
            yield opened

    def _line(self, run: Run) -> Record:
        """Read again only when the metrics changed; the state may change without them."""
        mark = _mark(run.path / "metrics.jsonl")
        kept = self._lines.get(run.name)
        if kept is None or kept[0] != mark:
            last = run.last()
            names = SHOWN[run.kind]
            kept = (
                mark,
                {
                    **{name: last.get(name) for name in ("step", *names, "seconds")},
                    "shown": [[name, title_of(name), last.get(name)] for name in names],
                    "spark": glance(run.path / "metrics.jsonl", names[0]),
                },
            )
            self._lines[run.name] = kept
        return {
            "name": run.name,
            "changed": run.changed,
            "kind": run.kind,
            **kept[1],
            "state": state_of(run, kept[1]["seconds"]),
            **said(run),
        }


def state_of(run: Run, seconds: object, now: float | None = None) -> str:
    """training, finished, stopped, or stale: the run holds its lock but has written nothing for long."""
    state = run.state
    if state != "training" or run.kind != "ppo":  # fine-tuning writes at its evaluations alone
        return state
    pace = seconds if isinstance(seconds, (int, float)) else 0.0
    silence = (time.time() if now is None else now) - run.changed
    return "stale" if silence > max(QUIET, QUIET_STEPS * pace) else "training"


def said(run: Run) -> Record:
    """What is wrong with the run's small files, and why it ended."""
    config, results = run.config, run.results or {}
    return {
        "model": config.get("model_name"),
        "stop_reason": results.get("stop_reason"),
        "problems": run.problems,
    }


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
