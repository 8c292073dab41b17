"""`StepTimer`: measures seconds per decode step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import TypeAlias

import torch

Timestamp: TypeAlias = "float | torch.cuda.Event"


class StepTimer:
    """Times groups of decode steps by the device's own clock. Only reading the result synchronises."""

    def __init__(self, on_gpu: bool):
        self.on_gpu = on_gpu
        self._laps: list[tuple[Timestamp, Timestamp, int]] = []

    @contextmanager
    def lap(self, steps: int) -> Iterator[int]:
        start = self._now()
        yield steps
        self._laps = [*self._laps[-99:], (start, self._now(), steps)]

    def _now(self) -> Timestamp:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        """Seconds per step, the median over the last laps; nan without any."""
        if self.on_gpu:
            torch.accelerator.synchronize()
        laps = [_elapsed(start, end) / steps for start, end, steps in self._laps if steps]
        return median(laps) if laps else math.nan


def _elapsed(start: Timestamp, end: Timestamp) -> float:
    """Seconds."""
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1000
    assert isinstance(end, float)
    return end - start
