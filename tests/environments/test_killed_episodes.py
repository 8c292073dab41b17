"""`kill -9` in the middle of an episode: the run resumes to the same bits, and no process is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from proxima.runs import Run

ROOT = Path(__file__).parents[2]
WAITING = """
import os
import time

from tests.environments.games import Parity


class Waits(Parity):
    def step(self, text):
        if self.turns == 1 and os.path.exists("wait"):
            with open("inside", "a") as file:
                file.write(f"{os.getpid()}\\n")
            time.sleep(600)
        return super().step(text)
"""
SETTINGS = """--batch-size 4 --minibatch-size 4 --max-new-tokens 4 --max-turns 3 --learning-rate 1e-3 --checkpoint-every 1
    --environment waiting:Waits --step-seconds 300 --skip-checks --data prompts.txt --resume"""


def command(tiny, name):
    words = ["train", "--model-name", tiny, *SETTINGS.split(), "--run-name", name]
    return [sys.executable, "-m", "proxima", *words]


def is_alive(marker):
    """Whether a process of this folder is left; inside its namespace a worker has another number."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "cwd") == str(marker) and int(folder.name) != os.getpid():
                return True
        except OSError:
            continue
    return False


def wait_for(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(280)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_inside_an_episode_it_resumes_to_the_same_bits(tiny, tmp_path, forked):
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "prompts.txt").write_text("\n".join(f"Post {i} TL;DR:" for i in range(12)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    forked(command(tiny, "whole"), tmp_path).check_returncode()

    def steps():
        return Run(tmp_path / "runs" / "killed").last().get("step", 0)

    trainer = subprocess.Popen(command(tiny, "killed"), cwd=tmp_path, env=environment)
    wait_for(lambda: (tmp_path / "runs" / "killed" / "metrics.jsonl").is_file() and steps() >= 1)
    (tmp_path / "wait").touch()
    wait_for(lambda: (tmp_path / "inside").is_file() or trainer.poll() is not None)
    assert trainer.poll() is None
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_for(lambda: not is_alive(tmp_path), 20)
    (tmp_path / "wait").unlink()
    forked(command(tiny, "killed"), tmp_path).check_returncode()
    files = [
        tmp_path / "runs" / name / "policy" / "adapter_model.safetensors" for name in ("whole", "killed")
    ]
    from safetensors.torch import load_file

    one, other = map(load_file, files)
    assert all(torch.equal(one[name], other[name]) for name in one)
