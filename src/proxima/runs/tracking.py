"""Experiment trackers, where installed and configured.

In: metrics. Out: TensorBoard files, or a W&B or Trackio run.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol


class Tracker(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoardTracker:
    def __init__(self, folder: Path, settings: Mapping[str, object], step: int = -1):
        module = _require("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class HostedTracker:
    """W&B and Trackio share one interface: init, log, finish."""

    def __init__(self, package: str, folder: Path, settings: Mapping[str, object]):
        module = _require(package, package)
        extra = {"dir": str(folder)} if package == "wandb" else {}
        self._run = module.init(project="proxima", name=folder.name, config=dict(settings), **extra)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def open_trackers(
    names: Sequence[str], folder: Path, settings: Mapping[str, object], step: int = -1
) -> list[Tracker]:
    """
    Args:
        step: where a resumed run continues, -1 for a new one; TensorBoard drops what came after it. Hosted
            trackers start another run of the same name.
    """
    return [
        TensorBoardTracker(folder, settings, step)
        if name == "tensorboard"
        else HostedTracker(name, folder, settings)
        for name in names
    ]


def _require(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"the tracker {package!r} is not installed ({error}); pip install {package}"
        ) from None
