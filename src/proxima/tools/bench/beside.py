"""A PPO step while other processes keep the cores busy.

In: a case and their number. Out: seconds per step alone and beside them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import torch

from proxima.core.json_record import Record
from proxima.ppo_trainer import PPOTrainer
from proxima.tools.bench.bench_case import Case, make_prompts, measured

BUSY = "import os\nprint(flush=True)\nwhile os.getppid() == {parent}:\n    sum(range(100_000))"
"""Keeps a core busy until its parent ends, however that happens."""


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """This many processes compute without pause inside the block; in sessions of their own, so that Ctrl-C
    does not reach them."""
    command = [sys.executable, "-I", "-S", "-c", BUSY.format(parent=os.getpid())]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
        for process in started:
            process.stdout.read(1)  # type: ignore[union-attr]  # it runs
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def run_beside(
    case: Case, count: int, steps: int = 3, folder: str | None = None, **settings: object
) -> Record:
    """Time `steps` pairs of PPO steps, one alone and one beside `count` busy processes; the median of each.

    Only the ratio matters, so a quarter of the case's batch is enough.
    """
    case = replace(case, batch=max(1, case.batch // 4))
    return measured(case, lambda trainer: _in_turn(trainer, case, count, steps), folder, **settings)


def _in_turn(trainer: PPOTrainer, case: Case, count: int, steps: int) -> Record:
    alone: list[float] = []
    beside: list[float] = []
    for warm_up in range(2):
        trainer.ppo_step(make_prompts(case, warm_up))
    for step in range(2, 2 + steps):
        prompts = make_prompts(case, step)
        alone.append(trainer.ppo_step(prompts)["seconds"])
        with busy_processes(count):
            beside.append(trainer.ppo_step(prompts)["seconds"])
    return {
        "processes": count,
        "batch": case.batch,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "alone": median(alone),
        "beside": median(beside),
        "ratio": median(beside) / median(alone),
        "all": {"alone": alone, "beside": beside},
    }


def beside_line(name: str, found: Record) -> str:
    return (
        f"{name}, batch {found['batch']}, {found['processes']} busy processes beside it on {found['cores']} "
        f"cores: {found['beside']:.2f} s per step, alone {found['alone']:.2f} s: {found['ratio']:.1f} "
        "times as long"
    )
