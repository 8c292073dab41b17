"""One run folder for all processes. In: a config. Out: the folder, which the main process alone holds and
writes.

Every process calls the same methods in the same order; what the main process gets, a result or an error, all
get. Checkpoints are read by every process itself, so that the folder must lie where all machines see it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeVar

from proxima.config import PPOConfig
from proxima.core.json_record import Record
from proxima.runs import RunFolder
from proxima.runs.checkpoint import Checkpoint
from proxima.runtime.distributed import Processes, started_by_torchrun

Plain = TypeVar("Plain")  # what all processes get from the main one: plain values

LAUNCH = ".launch"  # in a run folder: which torchrun began or resumed it


class SharedCheckpoints:
    """The checkpoints of the main process's `RunFolder`."""

    def __init__(self, shared: SharedRun):
        self._on_main = shared._on_main

    def write(self, state: Record, fill: Callable[[Path], object]) -> Path:
        return Path(self._on_main(lambda run: str(run.checkpoints.write(state, fill))))

    def newest(self, last: float = float("inf")) -> Checkpoint | None:
        return to_checkpoint(self._on_main(lambda run: from_checkpoint(run.checkpoints.newest(last))))

    def best(self, last: float = float("inf")) -> Checkpoint | None:
        return to_checkpoint(self._on_main(lambda run: from_checkpoint(run.checkpoints.best(last))))

    def by_evaluation(self) -> list[Path]:
        return [
            Path(path)
            for path in self._on_main(lambda run: [str(path) for path in run.checkpoints.by_evaluation()])
        ]

    def forget_after(self, checkpoint: Checkpoint) -> None:
        self._on_main(lambda run: run.checkpoints.forget_after(checkpoint))


class SharedRun:
    """A `RunFolder` that every process can call."""

    def __init__(self, config: PPOConfig, resume: bool, processes: Processes):
        self._run: RunFolder | None = None
        self._processes = processes
        found = processes.on_main(lambda: self._open(config, resume))
        self.path, self.checkpoint = Path(found["path"]), to_checkpoint(found["checkpoint"])
        self.checkpoints = SharedCheckpoints(self)
        processes.on_all(self._look)

    def _open(self, config: PPOConfig, resume: bool) -> Record:
        self._run = RunFolder(config, resume)
        return {"path": str(self._run.path.resolve()), "checkpoint": from_checkpoint(self._run.checkpoint)}

    def _look(self) -> None:
        if not self.path.is_dir():
            raise ValueError(
                f"{platform.node()} does not see {self.path}; put run_dir on a disk that all machines share"
            )

    @property
    def warnings(self) -> int:
        """Asked for where a checkpoint's state is made, of which the main process writes its own."""
        return self._run.warnings if self._run else 0

    def _on_main(self, work: Callable[[RunFolder], Plain]) -> Plain:
        return self._processes.on_main(lambda: work(self._run))  # type: ignore[arg-type]

    def begin(self, step: int = -1, warnings: int = 0) -> list[dict[str, float]]:
        return self._on_main(lambda run: run.begin(step, warnings))

    def go_back(self, step: int) -> list[dict[str, float]]:
        return self._on_main(lambda run: run.go_back(step))

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        self._on_main(lambda run: run.write_metrics(metrics))

    def write_samples(self, step: int, samples: Iterable[Record]) -> None:
        self._on_main(lambda run: run.write_samples(step, samples))

    def write_tokens(self, step: int, records: Sequence[Record]) -> None:
        self._on_main(lambda run: run.write_tokens(step, records))

    def write_warning(self, step: int, guard: str, message: str, action: str) -> None:
        self._on_main(lambda run: run.write_warning(step, guard, message, action))

    def write_best_constants(self, found: Record) -> None:
        self._on_main(lambda run: run.write_best_constants(found))

    def write_results(self, results: Record) -> None:
        self._on_main(lambda run: run.write_results(results))

    def sync(self) -> None:
        self._on_main(lambda run: run.sync())

    def __enter__(self) -> SharedRun:
        return self

    def __exit__(self, *problem: object) -> None:
        if self._run is not None:
            self._run.__exit__(*problem)


AnyRun = RunFolder | SharedRun


def open_run(config: PPOConfig, resume: bool, processes: Processes) -> AbstractContextManager[AnyRun]:
    """The run folder; that of a run which torchrun started again (--max-restarts) is resumed without being
    asked to."""
    resume = processes.on_main(lambda: was_restarted(config)) or resume
    with ExitStack() as stack:
        run: AnyRun = (
            SharedRun(config, resume, processes) if processes.is_distributed else RunFolder(config, resume)
        )
        stack.push(run)
        if started_by_torchrun():
            processes.on_main(lambda: (run.path / LAUNCH).write_text(launch_id(), encoding="utf-8"))
        stack.pop_all()
    return run


def was_restarted(config: PPOConfig) -> bool:
    """Whether this torchrun has begun this very run before."""
    restarts, allowed = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    if allowed and not config.run_name:
        raise ValueError(
            "torchrun --max-restarts needs run_name, so that a run that is started again finds its folder"
        )
    launch = Path(config.run_dir) / config.run_name / LAUNCH
    return restarts > 0 and launch.is_file() and launch.read_text(encoding="utf-8") == launch_id()


def launch_id() -> str:
    """The same for all restarts of one torchrun: its --rdzv-id, or its process."""
    named = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return named if named != "none" else f"{platform.node()} {os.getppid()}"


def from_checkpoint(checkpoint: Checkpoint | None) -> tuple[str, Record] | None:
    return None if checkpoint is None else (str(checkpoint.path.resolve()), checkpoint.state)


def to_checkpoint(plain: tuple[str, Record] | None) -> Checkpoint | None:
    return None if plain is None else Checkpoint(Path(plain[0]), plain[1])
