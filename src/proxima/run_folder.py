"""The folder of a run. In: a config, then metrics and samples. Out: config.yaml, metrics.jsonl, samples.jsonl; trackers fed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from proxima.config import PPOConfig
from proxima.tracking import open_trackers


class RunFolder:
    """Open while a run trains; each line is on disk as soon as it is written."""

    def __init__(self, config: PPOConfig):
        self.path = _new_folder(config)
        self._trackers = open_trackers(config.trackers, self.path, config.to_dict())
        config.to_yaml(self.path / "config.yaml")
        self._metrics: IO[str] = (self.path / "metrics.jsonl").open("w", encoding="utf-8")
        self._samples: IO[str] = (self.path / "samples.jsonl").open("w", encoding="utf-8")

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        _write_line(self._metrics, metrics)
        for tracker in self._trackers:
            tracker.log({name: value for name, value in metrics.items() if math.isfinite(value)}, int(metrics["step"]))

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        for sample in samples:
            _write_line(self._samples, {"step": step, **sample})

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *problem: object) -> None:
        self._metrics.close()
        self._samples.close()
        for tracker in self._trackers:
            tracker.close()


def _new_folder(config: PPOConfig) -> Path:
    """runs/NAME, or runs/<time> with a number where that is taken. A folder with a run in it is never written over."""
    parent = Path(config.run_dir)
    if config.run_name:
        path = parent / config.run_name
        if (path / "metrics.jsonl").exists():
            raise ValueError(f"{path} already holds a run; choose another run_name or move it away")
        path.mkdir(parents=True, exist_ok=True)
        return path
    parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        path = parent / (stamp if number == 0 else f"{stamp}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise ValueError(f"no free folder for a run under {parent}")


def _write_line(file: IO[str], record: Mapping[str, Any]) -> None:
    """One JSON object a line; nan and infinities, which JSON has not, become null."""
    plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
    file.write(json.dumps(plain, ensure_ascii=False) + "\n")
    file.flush()
