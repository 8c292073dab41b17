"""One run folder for all processes. In: a config. Out: the folder, which the first process alone holds and
writes.

Every process calls the same methods in the same order; what the first one gets, a result or an error, they
all get. Checkpoints are read by every process itself, so that the folder must lie where all machines see it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from proxima.config import PPOConfig
from proxima.runs.checkpoint import Checkpoint
from proxima.runs.run_writer import RunFolder
from proxima.runtime.distributed import started_by_torchrun
from proxima.runtime.distributed.process_group import Processes

LAUNCH = ".launch"  # in a run folder: which torchrun began or resumed it


class SharedCheckpoints:
    """The checkpoints of the first process's `RunFolder`."""

    def __init__(self, run: RunFolder | None, processes: Processes):
        self._run, self._processes = run, processes

    def _lead(self, work: Callable[[RunFolder], Any]) -> Any:
        return self._processes.on_main(lambda: work(self._run))  # type: ignore[arg-type]

    def write(self, state: dict[str, Any], fill: Callable[[Path], object]) -> Path:
        return Path(self._lead(lambda run: str(run.checkpoints.write(state, fill))))

    def newest(self, last: float = float("inf")) -> Checkpoint | None:
        return to_checkpoint(self._lead(lambda run: from_checkpoint(run.checkpoints.newest(last))))

    def best(self, last: float = float("inf")) -> Checkpoint | None:
        return to_checkpoint(self._lead(lambda run: from_checkpoint(run.checkpoints.best(last))))

    def by_evaluation(self) -> list[Path]:
        return [
            Path(path)
            for path in self._lead(lambda run: [str(path) for path in run.checkpoints.by_evaluation()])
        ]

    def forget_after(self, checkpoint: Checkpoint) -> None:
        self._lead(lambda run: run.checkpoints.forget_after(checkpoint))


class SharedRun:
    """A `RunFolder` that every process can call; methods not named here return nothing."""

    def __init__(self, config: PPOConfig, resume: bool, processes: Processes):
        self._run: RunFolder | None = None
        self._processes = processes
        found = processes.on_main(lambda: self._open(config, resume))
        self.path, self.checkpoint = Path(found["path"]), to_checkpoint(found["checkpoint"])
        self.checkpoints = SharedCheckpoints(self._run, processes)
        processes.on_all(self._look)

    def _open(self, config: PPOConfig, resume: bool) -> dict[str, Any]:
        self._run = RunFolder(config, resume)
        return {"path": str(self._run.path.resolve()), "checkpoint": from_checkpoint(self._run.checkpoint)}

    def _look(self) -> None:
        if not self.path.is_dir():
            raise ValueError(
                f"{platform.node()} does not see {self.path}; put run_dir on a disk that all machines share"
            )

    @property
    def warnings(self) -> int:
        return (
            self._run.warnings if self._run else 0
        )  # asked for where a checkpoint's state is made; the first one's is written

    def begin(self, step: int = 0, warnings: int = 0) -> list[dict[str, float]]:
        return self._processes.on_main(lambda: self._run.begin(step, warnings))  # type: ignore[union-attr]

    def go_back(self, step: int) -> list[dict[str, float]]:
        return self._processes.on_main(lambda: self._run.go_back(step))  # type: ignore[union-attr]

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*given: Any, **named: Any) -> None:
            self._processes.on_main(lambda: getattr(self._run, name)(*given, **named) and None)

        return call

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


def from_checkpoint(checkpoint: Checkpoint | None) -> list[Any] | None:
    return None if checkpoint is None else [str(checkpoint.path.resolve()), checkpoint.state]


def to_checkpoint(plain: list[Any] | None) -> Checkpoint | None:
    return None if plain is None else Checkpoint(Path(plain[0]), plain[1])
