"""`Checkpoints`: which checkpoints of a run are kept, and the newest or best that is undamaged.

In: a step's state and weights. Out: the newest or best one that is undamaged.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from proxima.core.json_record import Record, RecordView
from proxima.core.regular_files import read_file
from proxima.runs.checkpoint.atomic_folders import (
    Damaged,
    check_folder,
    remove_folder,
    remove_leftovers,
    write_folder,
)

log = logging.getLogger(__name__)

STATE = "state.json"
PREFIX = "step-"
NAME = re.compile(PREFIX + r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums were right when it was opened."""

    path: Path
    state: Record

    @property
    def step(self) -> int:
        return int(self.state["step"])


class Checkpoints:
    """`step-00000010`, ...

    in one folder. The newest `keep` and the best by evaluation stay; the rest are deleted.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def write(self, state: RecordView, fill: Callable[[Path], object]) -> Path:
        """
        Args:
            state: plain values; `step` names the checkpoint, `eval_reward` (a number or None) ranks it.
            fill: writes the rest into the folder it is given.
        """

        def fill_all(folder: Path) -> None:
            fill(folder)
            (folder / STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")

        target = self._free_name(state["step"])
        try:
            write_folder(target, fill_all)
        except OSError as error:
            earlier = [path.name for path in self.paths()]
            raise ValueError(
                f"cannot write the checkpoint {target}: {error.strerror or error}; free some space or fix "
                "the folder, then --resume" + (f" ({earlier[-1]} is still there)" if earlier else "")
            ) from error
        self._prune()
        return target

    def paths(self) -> list[Path]:
        """Oldest first."""
        return sorted(
            (path for path in self.folder.glob(f"{PREFIX}*") if NAME.fullmatch(path.name) and path.is_dir()),
            key=_place,
        )

    def newest(self, last: float = math.inf) -> Checkpoint | None:
        """The newest undamaged one up to step `last`, or None; every damaged one on the way is named."""
        return self._first_good(path for path in reversed(self.paths()) if _place(path)[0] <= last)

    def best(self, last: float = math.inf) -> Checkpoint | None:
        """The undamaged one with the best evaluation up to step `last`; None where none was evaluated."""
        return self._first_good(path for path in self.by_evaluation() if _place(path)[0] <= last)

    def by_evaluation(self) -> list[Path]:
        """Those that were evaluated, the best first, the earliest of equals first."""
        judged = [(reward, path) for path in self.paths() if (reward := _eval_reward(path)) is not None]
        return [path for _, path in sorted(judged, key=lambda item: -item[0])]

    def forget_after(self, checkpoint: Checkpoint) -> None:
        """Delete the checkpoints after the one that the run resumes from."""
        for path in self.paths():
            if _place(path) > _place(checkpoint.path):
                remove_folder(path)

    def clean(self) -> None:
        remove_leftovers(self.folder)

    def _first_good(self, paths: Iterable[Path]) -> Checkpoint | None:
        for path in paths:
            try:
                check_folder(path)
                return Checkpoint(path, json.loads(read_file(path / STATE)))
            except (Damaged, OSError, ValueError, RecursionError) as error:
                log.warning("checkpoint %s is damaged; skipped: %s", path, error)
        return None

    def _prune(self) -> None:
        best = self.by_evaluation()[:1]
        for path in self.paths()[: -self.keep]:
            if path not in best:
                remove_folder(path)

    def _free_name(self, step: int) -> Path:
        """A step that was rolled back is written again beside its earlier checkpoint, never over it: -1,
        -2, ... are newer."""
        name = f"{PREFIX}{step:08d}"
        taken = [again for number, again in map(_place, self.paths()) if number == step]
        return self.folder / (f"{name}-{max(taken) + 1}" if taken else name)


def _place(path: Path) -> tuple[int, int]:
    """The step of a checkpoint, and how often that step had been written before: step-00000010-2 is (10,
    2)."""
    step, again = NAME.fullmatch(path.name).groups("0")  # type: ignore[union-attr]
    return int(step), int(again)


def _eval_reward(path: Path) -> float | None:
    try:
        return eval_reward(json.loads(read_file(path / STATE)))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def eval_reward(state: Record) -> float | None:
    """The evaluation that ranks a checkpoint; None where there was none. Older ones call it a verdict."""
    return state.get("eval_reward", state.get("verdict"))
