"""Runs of an experiment, several at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def in_jobs(jobs: int, calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of these calls, in order; several at a time, each in a process with one thread."""
    if jobs == 1:
        return [call() for call in calls]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawned, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
