"""The folder of a PPO run. In: a config, then metrics, samples and warnings. Out: files in runs/NAME, and
the same metrics to trackers.

config.yaml  environment.json  metrics.jsonl  samples.jsonl  warnings.jsonl  log.txt  results.json
checkpoints/  tokens/
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TextIO

from proxima.config import PPOConfig, shareable
from proxima.core.json_record import Record
from proxima.core.regular_files import check_files
from proxima.core.terminal_text import LineFormatter, stderr_handler
from proxima.runs.checkpoint import Checkpoint, Checkpoints, replace_text, sync
from proxima.runs.environment import changed, describe_environment
from proxima.runs.glossary import check_declared
from proxima.runs.run_files import BEST_CONSTANTS, make_run_folder, plain, write_json
from proxima.runs.run_origin import write_origin
from proxima.runs.tracking import Tracker, open_trackers

log = logging.getLogger(__name__)

METRICS, SAMPLES, WARNINGS, TOKENS = "metrics.jsonl", "samples.jsonl", "warnings.jsonl", "tokens"


class RunFolder:
    """Locked by one process while a run trains; each line is on disk as soon as it is written."""

    def __init__(self, config: PPOConfig, resume: bool = False):
        """Lock the folder; nothing of an earlier run is changed before `begin`.

        Args:
            resume: continue the run in it; if there is none, start one.
        """
        self.config, self.warnings = config, 0
        self._files: dict[str, IO[str]] = {}
        self._trackers: list[Tracker] = []
        self._stack = ExitStack()
        try:
            if resume and not config.run_name:
                raise ValueError("resuming needs run_name: the run's folder in run_dir")
            self.path = make_run_folder(Path(config.run_dir), config.run_name)
            self._stack.enter_context(lock_folder(self.path))
        except OSError as error:
            raise ValueError(
                f"cannot write to the run folder under {config.run_dir}: {error.strerror or error}"
            ) from error
        with ExitStack() as undo:
            undo.push(self._stack)
            self.checkpoints = Checkpoints(self.path / "checkpoints", config.keep_checkpoints)
            if not resume and ((self.path / METRICS).exists() or self.checkpoints.paths()):
                raise ValueError(
                    f"{self.path} already holds a run; continue it with --resume or choose another run_name"
                )
            self._stack.enter_context(log_file(self.path / "log.txt"))
            self.checkpoint = self._find_checkpoint() if resume else None
            undo.pop_all()

    def _find_checkpoint(self) -> Checkpoint | None:
        if (found := self.checkpoints.newest()) is not None:
            return found
        if damaged := self.checkpoints.paths():
            raise ValueError(
                f"every checkpoint in {damaged[0].parent} is damaged; start again under another run_name"
            )
        if _has_steps(self.path / METRICS):
            raise ValueError(f"{self.path} has metrics but no checkpoint; start again under another run_name")
        return None

    def begin(self, step: int = -1, warnings: int = 0) -> list[dict[str, float]]:
        """Open the files, cut back to a step (and a number of warnings); returns the metrics up to there.

        Args:
            step: -1 = nothing stays, not even an evaluation before the first step.
        """
        self._trackers = open_trackers(self.config.trackers, self.path, self.config.to_dict(), step)
        dataclasses.replace(self.config, run_name=self.path.name).to_yaml(self.path / "config.yaml")
        self._write_environment()
        write_origin(self.path, "ppo", resumed=self.checkpoint is not None)
        self.checkpoints.clean()
        return self.go_back(step, warnings)

    def go_back(self, step: int, warnings: int | None = None) -> list[dict[str, float]]:
        """Drop the lines after a step; returns the metrics that stay.

        Args:
            warnings: how many of them stay; None = all.
        """
        for file in self._files.values():
            file.close()
        metrics = _cut(self.path / METRICS, lambda _, line: line["step"] <= step)
        _cut(self.path / SAMPLES, lambda _, line: line["step"] <= step)
        for path in (self.path / TOKENS).glob(
            "*step-*.json*"
        ):  # also what a killed process left half-written
            number = path.stem.removeprefix("step-")
            if path.suffix == ".part" or (number.isdigit() and int(number) > step):
                path.unlink()
        self.warnings = len(_cut(self.path / WARNINGS, lambda place, _: warnings is None or place < warnings))
        self._files = {
            name: (self.path / name).open("a", encoding="utf-8") for name in (METRICS, SAMPLES, WARNINGS)
        }
        return [
            {name: math.nan if value is None else value for name, value in line.items()} for line in metrics
        ]

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        """One line of `metrics.jsonl`; every name in it must be declared."""
        check_declared(metrics)
        write_line(self._files[METRICS], metrics)
        for tracker in self._trackers:
            tracker.log(
                {name: value for name, value in metrics.items() if math.isfinite(value)}, int(metrics["step"])
            )

    def write_samples(self, step: int, samples: Iterable[Mapping[str, object]]) -> None:
        for sample in samples:
            write_line(self._files[SAMPLES], {"step": step, **sample})

    def write_tokens(self, step: int, records: Sequence[Mapping[str, object]]) -> None:
        path = self.path / TOKENS / f"step-{step:08d}.json"
        path.parent.mkdir(exist_ok=True)
        text = json.dumps(
            plain({"step": step, "samples": records}), ensure_ascii=False, separators=(",", ":")
        )
        try:
            replace_text(path, text + "\n")
        except OSError as error:
            raise cannot_write(path, error) from error

    def write_warning(self, step: int, guard: str, message: str, action: str) -> None:
        write_line(
            self._files[WARNINGS], {"step": step, "guard": guard, "message": message, "action": action}
        )
        self.warnings += 1

    def write_best_constants(self, found: Mapping[str, object]) -> None:
        """Of each verifiable reward `answer` and `score`."""
        path = self.path / BEST_CONSTANTS
        write_json(path, found) if found else path.unlink(missing_ok=True)

    def write_results(self, results: Mapping[str, object]) -> None:
        write_json(self.path / "results.json", results)

    def sync(self) -> None:
        """Flush what was written so far to the disk itself: a checkpoint relies on it."""
        for name in self._files:
            sync(self.path / name)

    def _write_environment(self) -> None:
        path, now = self.path / "environment.json", describe_environment()
        with suppress(OSError, ValueError):
            if self.checkpoint and (
                differences := changed(json.loads(path.read_text(encoding="utf-8")), now)
            ):
                log.warning(
                    "the run started on another system; last digits may differ (%s)", "; ".join(differences)
                )
        write_json(path, now)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *problem: object) -> None:
        for file in self._files.values():
            with suppress(OSError):  # a full disk: what could not be written was said when it was tried
                file.close()
        for tracker in self._trackers:
            tracker.close()
        self._stack.close()


def lock_folder(folder: Path) -> ExitStack:
    """Held until closed or until the process dies, however it dies. File systems without locks go without."""
    try:
        check_files(folder)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}; move it away") from None
    held = ExitStack()
    file = held.enter_context((folder / ".lock").open("a+", encoding="utf-8"))
    try:
        import fcntl

        _try_again(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip()
        held.close()
        raise ValueError(
            f"{folder} is in use by process {owner or '?'}; wait for its end or choose another run_name"
        ) from None
    except (ImportError, OSError) as error:
        log.warning("%s cannot be locked (%s): start no second process on it", folder, error)
    return held


def _try_again(lock: Callable[[], None], tries: int = 5) -> None:
    """A reader that asks whether a run is training (`proxima.runs`, the studio) holds its lock for a moment;
    that does not count as in use."""
    for left in reversed(range(tries)):
        try:
            return lock()
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.02)


def log_file(path: Path) -> ExitStack:
    """Log messages of the package, from INFO up, and warnings also go to a file."""
    logger, stack = logging.getLogger("proxima"), ExitStack()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s"))
    stack.callback(handler.close)
    shown = (
        [] if logger.hasHandlers() or logging.lastResort is None else [stderr_handler()]
    )  # warnings stay on stderr
    for each in (handler, *shown):
        logger.addHandler(each)
        stack.callback(logger.removeHandler, each)
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.INFO)
    shows = warnings.showwarning
    stack.callback(setattr, warnings, "showwarning", shows)

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        said = shareable(str(message))
        handler.handle(logging.LogRecord("proxima", logging.WARNING, filename, lineno, said, None, None))
        shows(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    return stack


def _cut(path: Path, stays: Callable[[int, Record], bool]) -> list[Record]:
    """The lines from the start for as long as they are whole and `stays(place, line)`; afterwards the file
    holds exactly these."""
    kept: list[Record] = []
    end = 0
    given = path.read_bytes() if path.exists() else b""
    for place, line in enumerate(given.splitlines(keepends=True)):
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not stays(place, record):
            break
        kept.append(record)
        end += len(line)
    if end < len(given):
        replace_text(path, given[:end].decode())
    return kept


def _has_steps(path: Path) -> bool:
    """Whether a step was logged; an evaluation before the first one is none."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return any(b'"avg_reward"' in line for line in lines if line.endswith(b"\n"))


def write_line(file: IO[str], record: Mapping[str, object]) -> None:
    """One JSON object per line."""
    try:
        file.write(json.dumps(plain(record), ensure_ascii=False) + "\n")
        file.flush()
    except OSError as error:
        raise cannot_write(file.name, error) from error


def cannot_write(path: str | Path, error: OSError) -> ValueError:
    return ValueError(
        f"cannot write to {path}: {error.strerror}; free some space or fix the folder, then --resume"
    )
