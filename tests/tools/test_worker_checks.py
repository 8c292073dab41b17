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


EPISODES = {"environment": "a:Game", "max_turns": 2}
BOMB = "a fork bomb, signals to your other processes"


def test_what_is_open_on_this_machine_is_said_where_it_matters(monkeypatch):
    for given in ({"rewards": ["choice", "a:f"]}, EPISODES):
        assert check_protections(PPOConfig(**given)) == []
    (found,) = check_protections(PPOConfig(rewards=["code"]))
    with WorkerProcess(len, memory_mb=None, network=False, sandbox=True) as worker:
        worker.start()
    assert (found.level == "ok") == (all(worker.protections.values()) and sys.platform == "linux")
    monkeypatch.setattr(worker_checks, "WorkerProcess", WithoutNamespaces)
    (found,) = check_protections(PPOConfig(rewards=["code"]))
    assert found.level == "warn"
    assert f"open on this machine: {BOMB}, the network, files that you can write" in found.text
    assert "bubblewrap" in found.advice


@pytest.mark.parametrize(
    ("who", "given"),
    [
        ("rewards in workers", {"rewards": [{"source": "a:f", "options": {"workers": 2, "memory_mb": 0}}]}),
        ("environments and tools", {**EPISODES, "step_seconds": 5.0, "step_memory_mb": 0}),
    ],
)
def test_each_kind_of_worker_says_what_it_itself_is_kept_from(monkeypatch, who, given):
    (found,) = check_protections(PPOConfig(**given))
    assert found.level == "ok"
    assert found.text.startswith(f"{who} are kept from: ")
    assert "network" not in found.text
    assert found.text.endswith("memory without limit")
    with WorkerProcess(len, memory_mb=None) as worker:
        worker.start()
    assert ("a fork bomb" in found.text.partition("; open")[0]) == worker.protections["processes"]
    monkeypatch.setattr(worker_checks, "WorkerProcess", WithoutNamespaces)
    (found,) = check_protections(PPOConfig(**given))
    assert found.text == f"{who} are kept from: nothing; open on this machine: {BOMB}, memory without limit"


def test_one_finding_for_each_kind_of_worker():
    config = PPOConfig(rewards=["code", "a:f,workers=2"], **EPISODES, step_seconds=5.0)
    assert [found.text.partition(" are")[0] for found in check_protections(config)] == [
        "programs of the policy",
        "rewards in workers",
        "environments and tools",
    ]


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
