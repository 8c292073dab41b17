"""Waits of OpenMP's threads are short wherever we come before torch, and left as they are where the user
has chosen."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from proxima.base_setup.loading import load_network
from proxima.config import PPOConfig
from proxima.runtime import threads
from proxima.tools.doctor.resource_checks import check_threads

SOURCE = Path(__file__).parents[2] / "src"
CHOICES = (*threads.SHORT_WAIT, "OMP_WAIT_POLICY", "KMP_LIBRARY")
SHOW = f"import os; print({{name: os.environ[name] for name in {CHOICES} if name in os.environ}})"
AS_COMMAND = """import runpy, sys
sys.argv = ["proxima", "--version"]
try:
    runpy.run_module("proxima", run_name="__main__")
except SystemExit:
    pass
"""


def run(code: str, **chosen: str) -> subprocess.CompletedProcess:
    """In a fresh interpreter whose environment has none of the variables but these."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES} | {
        "PYTHONPATH": str(SOURCE)
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment | chosen,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


@pytest.mark.parametrize("code", [f"import proxima; {SHOW}", AS_COMMAND + SHOW], ids=["import", "command"])
def test_a_fresh_interpreter_has_short_waits(code):
    assert str(threads.SHORT_WAIT) in run(code).stdout


@pytest.mark.parametrize(
    "chosen", [{name: value} for name, value in zip(CHOICES, ("7", "7", "ACTIVE", "throughput"), strict=True)]
)
def test_what_the_user_has_chosen_stays(chosen):
    assert run(f"import proxima; {SHOW}", **chosen).stdout.strip() == str(chosen)


@pytest.mark.parametrize(("order", "in_time"), [("proxima, torch", True), ("torch, proxima", False)])
def test_torch_reads_them_if_it_comes_second(order, in_time):
    code = (
        f"import {order}; from proxima.runtime.threads import thread_wait_problem; "
        "print(thread_wait_problem(2)[1])"
    )
    done = run(code, OMP_DISPLAY_ENV="VERBOSE")
    assert ("import proxima first" in done.stdout) == (not in_time)
    if "GOMP_SPINCOUNT" in done.stderr:  # libgomp says what it has read
        assert ("GOMP_SPINCOUNT = '1000'" in done.stderr) == in_time


@pytest.fixture
def torch_first(monkeypatch):
    monkeypatch.setattr(threads, "CHOSEN_BY_USER", False)
    monkeypatch.setattr(threads, "TORCH_CAME_FIRST", True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def test_the_doctor_warns_where_it_came_too_late(torch_first, monkeypatch):
    found = check_threads(PPOConfig(device="cpu"))
    assert (found.level, found.name) == ("warn", "threads")
    assert "import proxima first, or set GOMP_SPINCOUNT=1000" in found.advice
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # nobody waits
    assert check_threads(PPOConfig(device="cpu")).level == "ok"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "CHOSEN_BY_USER", True)
    assert check_threads(PPOConfig(device="cpu")).level == "ok"


def test_so_does_a_model_that_is_loaded(torch_first, tiny, monkeypatch):
    config = PPOConfig(tiny, device="cpu")
    with pytest.warns(UserWarning, match="torch was imported before proxima.*; import proxima first"):
        load_network(config, tiny, torch.device("cpu"))
    monkeypatch.setattr(threads, "TORCH_CAME_FIRST", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_network(config, tiny, torch.device("cpu"))
