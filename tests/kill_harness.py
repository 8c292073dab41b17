"""The kill test. In: a number of kills. Out: whether a run that was killed so often equals one that never was, bit for bit.

`python -m tests.kill_harness --kills 30 --log FILE` (or `make kill`) trains a tiny model in processes of its own, kills them
with SIGKILL at random moments, resumes until the run ends, and compares weights, metrics and samples with an undisturbed run.

Some of the processes are made slow where a checkpoint is written (each flush of the disk waits first, in this wrapper, not in
the product), so that many kills fall inside a write.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPTS = [f"prompt number {i} about {'abcdefgh'[i % 8]}" for i in range(24)]
EPOCHS = 5  # of 6 steps each, where nobody says otherwise
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


def child(model: str, runs: str, name: str, slow: float, epochs: int) -> None:
    """The process that is killed: train or go on; where asked, wait before every flush to the disk."""
    import torch

    from proxima.config import PPOConfig
    from proxima.ppo_trainer import PPOTrainer

    torch.set_num_threads(1)
    if slow:
        flush = os.fsync

        def slow_flush(file: Any) -> None:
            print("writing", flush=True)
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
    same: bool = False


@dataclass
class Harness:
    """One model, one folder of runs, one seed for the moments of death."""

    model: str
    runs: Path
    epochs: int
    choose: random.Random
    say: Any
    report: Report = field(default_factory=Report)

    def start(self, name: str, slow: float = 0.0) -> subprocess.Popen[str]:
        """A process that trains this run, or goes on with it."""
        paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-u", "-m", "tests.kill_harness", "--child", self.model, str(self.runs), name, str(slow)]
        self.report.starts += 1
        return subprocess.Popen(
            [*command, str(self.epochs)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(self, name: str) -> None:
        process = self.start(name)
        output = await_line(process, "no such line")
        if process.wait():
            raise RuntimeError(f"{name} failed:\n{output}")

    def kill_and_resume(self, name: str, kills: int) -> bool:
        """One run from its start to its end, killed on the way while kills are left; whether it equals the whole one."""
        report, run = self.report, self.runs / name
        while report.kills < kills:
            slow = self.choose.choice([0.0, 0.0, 0.05])
            aim = "writing" if slow else self.choose.choice(["ready", "step"])
            if not kill_once(self.start(name, slow), self.choose.uniform(0, 1.5), aim):
                break  # it ended first
            report.kills += 1
            report.in_a_write += half_written(run)
            steps = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
            newest = steps[-1] if steps else "none"
            self.say(f"kill {report.kills}: {name}, newest checkpoint {newest}" + ", half-written" * half_written(run))
        self.finish(name)
        same = compare(self.runs / "whole", run)
        self.say(f"{name} ended: {'the same bits' if same else 'NOT THE SAME'} as the run that was never killed")
        return same


def await_line(process: subprocess.Popen[str], word: str) -> str:
    """Output up to the first line with this word in it, or to the process's end."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if word in line:
            break
    return seen


def kill_once(process: subprocess.Popen[str], wait: float, aim: str) -> bool:
    """Kill it so many seconds after `aim` was seen; whether it was still alive."""
    await_line(process, aim)
    time.sleep(wait)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()
    process.wait()
    return alive


def half_written(run: Path) -> bool:
    return any(path.suffix in (".part", ".gone") for path in [*run.glob(".*"), *(run / "checkpoints").glob(".*")])


def compare(left: Path, right: Path) -> bool:
    """Weights, samples and warnings byte for byte; metrics but for times."""

    def metrics(run: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in lines]

    exact = ["samples.jsonl", "warnings.jsonl"]
    exact += [str(path.relative_to(left)) for role in ("policy", "value") for path in sorted((left / role).iterdir())]
    return metrics(left) == metrics(right) and all((left / name).read_bytes() == (right / name).read_bytes() for name in exact)


def run_kills(kills: int, home: Path, seed: int = 0, epochs: int = EPOCHS, say: Any = print) -> Report:
    """Kill so many times, over as many runs as that takes, let each end, and compare."""
    from proxima.tiny import make_tiny_model

    harness = Harness(str(make_tiny_model(home / "model")), home / "runs", epochs, random.Random(seed), say)
    report, began, number = harness.report, time.perf_counter(), 0
    harness.finish("whole")
    report.same = True
    while report.kills < kills:
        number += 1
        report.same &= harness.kill_and_resume(f"killed-{number}", kills)
    report.seconds = time.perf_counter() - began
    return report


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:5], float(sys.argv[5]), int(sys.argv[6]))
        raise SystemExit
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("runs/kill.log"))
    given = parser.parse_args()
    given.log.parent.mkdir(parents=True, exist_ok=True)
    with given.log.open("w") as file, tempfile.TemporaryDirectory() as home:

        def say(text: str) -> None:
            print(text, flush=True)
            file.write(text + "\n")

        outcome = run_kills(given.kills, Path(home), given.seed, say=say)
        say(
            f"{outcome.kills} kills, {outcome.in_a_write} of them with something half-written, {outcome.starts} starts, "
            f"{outcome.seconds:.0f} s: {'every run the same bits' if outcome.same else 'DIFFERENT'}"
        )
    raise SystemExit(0 if outcome.same else 1)
