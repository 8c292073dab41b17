"""`Stopwatch`: the seconds of a step, by phase and in all."""

from __future__ import annotations

import time

import torch

from proxima.runtime import synchronize


class Stopwatch:
    """Seconds between laps; a lap on a GPU ends when its work has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        synchronize(self._device)
        now = time.perf_counter()
        self._laps[f"seconds/{name}"] = now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        return {**self._laps, "seconds": time.perf_counter() - self._start}
