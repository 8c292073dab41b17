"""`StepTimer`: how long decode steps take. In: laps. Out: seconds a step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch


class StepTimer:
    """Seconds of a decode step, by the device's own clock: reading it waits, stopping it does not."""

    def __init__(self, on_gpu: bool):
        self.on_gpu = on_gpu
        self._laps: list[tuple[Any, Any, int]] = []

    @contextmanager
    def lap(self, steps: int) -> Iterator[int]:
        start = self._now()
        yield steps
        self._laps = [*self._laps[-99:], (start, self._now(), steps)]

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        """The median over the last laps; nan where there was none."""
        if self.on_gpu:
            torch.cuda.synchronize()
        laps = [
            ((a.elapsed_time(b) / 1000 if self.on_gpu else b - a), steps)
            for a, b, steps in self._laps
            if steps
        ]
        return median(spent / steps for spent, steps in laps) if laps else math.nan
