"""`proxima bench --beside`: a step while other processes keep the cores busy.

In: a case and their number. Out: seconds per step alone and beside them, and alone in a process whose
threads wait as OpenMP's do by default (`runtime/threads.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from statistics import median

import torch

from proxima.core.json_record import Record
from proxima.ppo_trainer import PPOTrainer
from proxima.tools.bench.bench_case import Case, make_prompts, measured

BUSY = "import os\nprint(flush=True)\nwhile os.getppid() == {parent}:\n    sum(range(100_000))"
"""Keeps a core busy until its parent ends, however that happens."""
DEFAULT_WAIT = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}
"""What libgomp and Intel's and LLVM's OpenMP do where nothing is set."""
OTHER = "from proxima.tools.bench.beside import answer_steps; answer_steps()"


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
    on_gpu = torch.cuda.is_available()  # where waits of threads hardly matter
    with nullcontext() if on_gpu else other_process(case, folder, settings) as other:
        return measured(
            case, lambda trainer: _in_turn(trainer, case, count, steps, other), folder, **settings
        )


@contextmanager
def other_process(case: Case, folder: str | None, settings: Record) -> Iterator[Callable[[int], float]]:
    """Seconds of a step in a process whose threads wait as they do by default."""
    given = json.dumps({"case": asdict(case), "folder": folder, "settings": settings})
    kept = {name: text for name, text in os.environ.items() if name not in ("OMP_WAIT_POLICY", "KMP_LIBRARY")}
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, given],
        env={**kept, **DEFAULT_WAIT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def seconds(step: int) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: there is no answer
            print(step, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process with OpenMP's default waits ended with {process.wait()}")
        return float(answer)

    try:
        yield seconds
    finally:
        process.kill()
        process.communicate()


def answer_steps() -> None:
    """In `other_process`: a line with the seconds of each step that a line asks for."""
    given = json.loads(sys.argv[1])
    values: Record = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given["case"].items()
    }
    case = Case(**values)

    def answer(trainer: PPOTrainer) -> Record:
        for line in sys.stdin:
            print(trainer.ppo_step(make_prompts(case, int(line)))["seconds"], flush=True)
        return {}

    measured(case, answer, given["folder"], **given["settings"])


def _in_turn(
    trainer: PPOTrainer, case: Case, count: int, steps: int, other: Callable[[int], float] | None = None
) -> Record:
    alone: list[float] = []
    default_waits: list[float] = []
    beside: list[float] = []
    for warm_up in range(2):
        trainer.ppo_step(make_prompts(case, warm_up))
        if other is not None:
            other(warm_up)
    for step in range(2, 2 + steps):
        prompts = make_prompts(case, step)
        if other is not None:
            default_waits.append(other(step))
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
        **(_quiet(alone, default_waits) if default_waits else {}),
    }


def _quiet(alone: list[float], default_waits: list[float]) -> dict[str, float]:
    default = median(default_waits)
    return {"alone_with_default_waits": default, "quiet_ratio": median(alone) / default}


def beside_line(name: str, found: Record) -> str:
    quiet = (
        f"; alone with OpenMP's default waits {found['alone_with_default_waits']:.2f} s: ours takes "
        f"{found['quiet_ratio']:.2f} times as long"
        if "quiet_ratio" in found
        else ""
    )
    return (
        f"{name}, batch {found['batch']}, {found['processes']} busy processes beside it on {found['cores']} "
        f"cores: {found['beside']:.2f} s per step, alone {found['alone']:.2f} s: {found['ratio']:.1f} "
        f"times as long{quiet}"
    )
