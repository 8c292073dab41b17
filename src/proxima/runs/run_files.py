"""How every run folder is made and how its JSON files are written: PPO, fine-tuning, evaluation and the demo.

In: a folder's name, plain values. Out: a folder that no other run has; files that are whole or not there.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from proxima.runs.checkpoint import replace_text

TRIES = 1000  # folders begun within the same second
REPLAY_FOLDER = "replay"  # in a run's folder
BUNDLE_SUFFIX = ".safetensors"
BEST_CONSTANTS = "best_constants.json"  # in a run's folder: of each verifiable reward, answer and score


def make_run_folder(
    parent: Path, name: str, prefix: str = "", free: Callable[[Path], bool] | None = None
) -> Path:
    """`parent/name`, or without a name `parent/<time>`, with a number where that is taken.

    Args:
        prefix: begins a name that is made of the time.
        free: whether a folder that exists may be used; by default a named folder may, and any other is taken.
    """
    if name:
        path = parent / name
        if free is not None and not free(path):
            raise ValueError(f"{path} already holds a run; choose another run_name or move it away")
        path.mkdir(parents=True, exist_ok=True)
        return path
    parent.mkdir(parents=True, exist_ok=True)
    stamp = prefix + time.strftime("%Y%m%d-%H%M%S")
    for number in range(TRIES):
        path = parent / (stamp if number == 0 else f"{stamp}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise ValueError(f"no free folder for a run under {parent}")


def write_json(path: Path, value: object) -> None:
    """A JSON file in one move: the old one or the new one, never a mixture."""
    replace_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")


def plain(value: object) -> object:
    """As strict JSON holds it: nan and infinities, which JSON does not have, become null."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def bundle_paths(run: str | Path) -> list[Path]:
    """The recorded steps of a run, in the order of their names; none where the folder is a link."""
    folder = Path(run) / REPLAY_FOLDER
    paths = [] if folder.is_symlink() else folder.glob(f"*{BUNDLE_SUFFIX}")
    return sorted(path for path in paths if path.is_file())
