"""The doctor on worker processes: what they cost, what stays open, which constant answer wins."""

import sys

import pytest

from proxima.config import PPOConfig, RewardSpec
from proxima.core.types import Prompt
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import Samples, WorkerProcess
from proxima.rewards.function_reward import load_function
from proxima.rewards.worker_reward import open_function
from proxima.tools.doctor import worker_checks
from proxima.tools.doctor.worker_checks import check_cost, check_protections, constant_findings

SAMPLES = Samples(["p"] * 4, ["a", "b", "c", "d"], [[1]] * 4, [True] * 4)


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "import os\n"
        "def quick(prompts, completions):\n    return [1.0] * len(completions)\n"
        "def dies(prompts, completions):\n"
        "    if 'b' in completions:\n        os._exit(3)\n"
        "    return [1.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("own", None)


def cost(source, **options):
    spec = RewardSpec(source, options=options)
    reward = open_function(spec, source if callable(source) else load_function(source))
    return check_cost(spec, reward, SAMPLES)


def test_a_function_is_measured_both_ways(functions):
    for options in ({}, {"workers": 2}):
        found = cost("own:quick", **options)
        assert found.level == "ok"
        assert "per sample in the trainer" in found.text
        assert "per sample in a worker process" in found.text


def test_a_function_that_would_end_the_doctor_is_called_in_a_worker_only(functions):
    found = cost("own:dies", workers=1)
    assert found.level == "ok"
    assert "1 of 4 failed (1 exit; its process ended with exit code 3)" in found.text
    assert "in the trainer not measured" in found.text
    assert cost("own:dies").level == "warn"


def test_a_function_that_cannot_be_sent_is_measured_in_the_trainer(functions):
    stuck = (n for n in range(3))

    def keeps(prompts, completions):
        return [1.0 if stuck else 0.0] * len(completions)

    found = cost(keeps)
    assert "per sample in the trainer; " in found.text
    assert "cannot be sent" in found.text


def test_what_is_open_on_this_machine_is_said_where_it_matters(monkeypatch):
    assert check_protections(PPOConfig(rewards=["choice", "a:f"])) == []
    (found,) = check_protections(PPOConfig(rewards=["code"]))
    with WorkerProcess(len, memory_mb=None, network=False, sandbox=True) as worker:
        worker.start()
        closed = worker.protections["files"] and worker.protections["network"]
    assert (found.level == "ok") == (closed and sys.platform == "linux")
    monkeypatch.setattr(worker_checks, "WorkerProcess", WithoutNamespaces)
    (found,) = check_protections(PPOConfig(rewards=["code"]))
    assert found.level == "warn"
    assert (
        "open on this machine: a fork bomb and signals to your other processes, the network, files that you can write"
        in found.text
    )
    assert "bubblewrap" in found.advice
    assert check_protections(PPOConfig(environment="a:Game", max_turns=2)) == []
    for given in ({"rewards": ["a:f,workers=2"]}, {"environment": "a:Game", "step_seconds": 5.0}):
        (found,) = check_protections(PPOConfig(**given))
        assert found.level == "ok"
        assert "open on this machine: a fork bomb and signals to your other processes" in found.text


class WithoutNamespaces(WorkerProcess):
    """As on a kernel that allows none."""

    def __init__(self, target, **limits):
        super().__init__(target, **limits, namespaces=False)


def test_the_best_constant_answer_stands_beside_the_models_score(make_config):
    trainer = PPOTrainer(make_config(rewards=["choice"]))
    prompts = [Prompt(f"p{i}", {"answer": letter}) for i, letter in enumerate("AABC")]
    results = {"rewards_by_name": {"choice": [0.0, 1.0, float("nan"), 0.0]}}
    (found,) = constant_findings(trainer, prompts, results)
    assert (found.level, found.name) == ("warn", "best constant choice")
    assert "'A' scores 0.5, samples of the model 0.333" in found.text
    (fair,) = constant_findings(trainer, prompts[1:], results)
    assert fair.level == "ok"
