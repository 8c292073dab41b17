"""The kill test. In: a number of kills. Out: whether runs that were killed that often equal an
uninterrupted one, bit-exactly.

`python -m tests.kill_harness --kills 30 --log FILE` (or `make kill`) trains a tiny model in processes of its
own, kills them with SIGKILL at random moments, resumes until the run ends, and compares weights, metrics and
samples with an undisturbed run.

Half of the processes are made slow where a checkpoint is written (each flush to the disk waits first, by a
change made in that process, not in the product), so that many kills fall inside a write.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPTS = [f"prompt number {i} about {'abcdefgh'[i % 8]}" for i in range(24)]
EPOCHS = 5  # of 6 steps each
SETTINGS: dict[str, Any] = {
    "rewards": ["tests.conftest:count_e"],
    "batch_size": 4,
    "minibatch_size": 2,
    "ppo_epochs": 2,
    "max_new_tokens": 8,
    "learning_rate": 1e-3,
    "value_learning_rate": 1e-3,
    "kl_controller": "adaptive",
    "kl_target": 0.5,
    "kl_horizon": 100,
    "checkpoint_every": 2,
    "eval_every": 3,
}


def child(model: str, runs: str, name: str, epochs: int, slow: float, output: str) -> None:
    """The process that is killed: start or resume the run; where asked, wait before every flush to the
    disk."""
    number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(number, stream)
    import torch

    from proxima.config import PPOConfig
    from proxima.ppo_trainer import PPOTrainer

    torch.set_num_threads(1)
    if slow:
        flush = os.fsync

        def slow_flush(file: Any) -> None:
            time.sleep(slow)
            flush(file)

        os.fsync = slow_flush
    trainer = PPOTrainer(PPOConfig(model, run_dir=runs, run_name=name, **SETTINGS))
    print("ready", flush=True)
    trainer.train(PROMPTS, epochs, ["held out one", "held out two"], resume=True)


@dataclass
class Report:
    """What the kills hit."""

    kills: int = 0
    in_a_write: int = 0
    starts: int = 0
    seconds: float = 0.0
    same: bool = True


@dataclass
class Harness:
    """One model, one folder of runs, one seed for the moments of death."""

    home: Path
    epochs: int
    choose: random.Random
    quick: bool
    say: Any
    report: Report = field(default_factory=Report)

    def start(self, name: str, slow: float = 0.0) -> Any:
        """A process that starts or resumes this run; what it prints goes to a file.

        One that begins is a new interpreter with hashes of its own, unless all is to be quick. One that goes
        on is forked from a server that has imported everything: no kill falls into the imports, which take
        most of a start.
        """
        self.report.starts += 1
        self.output.unlink(missing_ok=True)
        begins = not (self.home / "runs" / name).exists()
        context: Any = multiprocessing.get_context("spawn" if begins and not self.quick else "forkserver")
        given = (str(self.home / "model"), str(self.home / "runs"), name, self.epochs, slow, str(self.output))
        process = context.Process(target=child, args=given)
        process.start()
        return process

    @property
    def output(self) -> Path:
        return self.home / "output.txt"

    def finish(self, name: str) -> None:
        process = self.start(name)
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{name} failed:\n{self.output.read_text()}")

    def kill(self, process: Any, aim: str, wait: float) -> bool:
        """SIGKILL this many seconds after `aim` was printed; returns whether it was still alive."""
        while process.is_alive() and not (self.output.exists() and aim in self.output.read_text()):
            time.sleep(0.02)
        process.join(wait)
        alive = process.is_alive()
        process.kill()
        process.join()
        if process.exitcode not in (0, -9):
            raise RuntimeError(f"a process failed before it was killed:\n{self.output.read_text()}")
        return alive

    def kill_and_resume(self, name: str, kills: int) -> None:
        """One run from its start to its end, killed on the way while kills are left; then compared."""
        report, run = self.report, self.home / "runs" / name
        while report.kills < kills:
            slow = self.choose.choice([0.0, 0.1])
            aim = self.choose.choice(["ready", "step  "])
            if not self.kill(self.start(name, slow), aim, self.choose.uniform(0, 3 if slow else 1.5)):
                break  # it ended first
            report.kills += 1
            left = [
                path
                for path in [*run.glob(".*"), *(run / "checkpoints").glob(".*")]
                if path.suffix in (".part", ".gone")
            ]
            report.in_a_write += bool(left)
            steps = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
            half = f", half-written: {left[0].name}" if left else ""
            self.say(f"kill {report.kills}: {name}, newest checkpoint {steps[-1] if steps else 'none'}{half}")
        self.finish(name)
        same = compare(self.home / "runs" / "whole", run)
        report.same &= same
        self.say(
            f"{name} ended: {'the same bits' if same else 'NOT THE SAME'} as the run that was never killed"
        )


def compare(left: Path, right: Path) -> bool:
    """Weights, samples, tokens and warnings byte for byte; metrics except times."""

    def metrics(run: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [
            {key: value for key, value in line.items() if not key.startswith("seconds")} for line in lines
        ]

    exact = ["samples.jsonl", "warnings.jsonl"]
    exact += [
        str(path.relative_to(left))
        for role in ("policy", "value")
        for path in sorted((left / role).iterdir())
    ]
    token_files = [
        {path.name: path.read_bytes() for path in (run / "tokens").iterdir()} for run in (left, right)
    ]
    same = metrics(left) == metrics(right) and token_files[0] == token_files[1]
    return same and all((left / name).read_bytes() == (right / name).read_bytes() for name in exact)


def run_kills(
    kills: int, home: Path, seed: int = 0, epochs: int = EPOCHS, quick: bool = False, say: Any = print
) -> Report:
    """Kill this many times, over as many runs as that takes, let each finish, and compare.

    Args:
        quick: every process is forked, also those that begin a run.
    """
    from proxima.world.tiny_models import make_tiny_model

    make_tiny_model(home / "model")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["proxima.ppo_trainer"])
    harness = Harness(home, epochs, random.Random(seed), quick, say)
    began, number = time.perf_counter(), 0
    harness.finish("whole")
    while harness.report.kills < kills:
        number += 1
        harness.kill_and_resume(f"killed-{number}", kills)
    harness.report.seconds = time.perf_counter() - began
    return harness.report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--log", type=Path, default=Path("runs/kill.log"))
    given = parser.parse_args()
    given.log.parent.mkdir(parents=True, exist_ok=True)
    with given.log.open("w") as file, tempfile.TemporaryDirectory() as home:

        def say(text: str) -> None:
            print(text, flush=True)
            print(text, file=file, flush=True)

        report = run_kills(given.kills, Path(home), given.seed, quick=given.quick, say=say)
        say(
            f"{report.kills} kills, {report.in_a_write} of them with something half-written on disk, "
            f"{report.starts} starts, "
            f"{report.seconds:.0f} s: {'every run the same bits' if report.same else 'DIFFERENT'}"
        )
    raise SystemExit(0 if report.same else 1)


if __name__ == "__main__":
    main()
