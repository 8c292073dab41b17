"""An environment class of TRL 1.12's own wheel, unchanged: `HarborBashEnv`, with a stand-in for the sandbox that
it asks for."""

import subprocess
import sys
import types
from importlib.util import find_spec

import pytest

from proxima import PPOTrainer
from proxima.core.types import Prompt
from tests.environments.test_episodes import call_of, scripted

if find_spec("trl") is None:
    pytest.skip(
        "TRL is not installed here: `make test-peer` has an environment for it", allow_module_level=True
    )
INSTRUCTION = "How many lines has names.txt?"


class Sandbox:
    """A folder in place of a container."""

    os = "linux"

    def __init__(self, folder):
        self.folder, self.is_open = folder, False

    async def start(self, force_build):
        self.is_open = True

    async def stop(self, delete):
        self.is_open = False

    async def run_healthcheck(self):
        pass

    async def empty_dirs(self, folders, chmod):
        pass

    async def exec(self, command, timeout_sec=60, user=None):
        command = command.replace("/workdir", str(self.folder)).replace("/home", str(self.folder / "home"))
        done = subprocess.run(
            command, check=False, shell=True, cwd=self.folder, capture_output=True, text=True
        )
        return types.SimpleNamespace(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)


def stand_in(monkeypatch, folder):
    """The modules of `harbor` that the class imports when an episode begins; what sandboxes were made."""
    made = []

    def create(**given):
        made.append(Sandbox(folder))
        return made[-1]

    async def verify():
        answer = folder / "answer.txt"
        right = answer.is_file() and answer.read_text().strip() == "3"
        return types.SimpleNamespace(rewards={"reward": float(right)})

    task = types.SimpleNamespace(
        instruction=INSTRUCTION,
        short_name="lines",
        paths=types.SimpleNamespace(environment_dir=folder),
        config=types.SimpleNamespace(environment=None, verifier=types.SimpleNamespace(env={})),
    )
    paths = types.SimpleNamespace(for_os=lambda system: types.SimpleNamespace(verifier_dir=folder))
    names = {
        "environments.factory": {
            "EnvironmentFactory": types.SimpleNamespace(create_environment_from_config=create)
        },
        "models.task.task": {"Task": lambda task_dir: task},
        "models.trial.config": {
            "EnvironmentConfig": types.SimpleNamespace,
            "VerifierConfig": types.SimpleNamespace,
        },
        "models.trial.paths": {"TrialPaths": types.SimpleNamespace, "EnvironmentPaths": paths},
        "verifier.factory": {
            "VerifierFactory": types.SimpleNamespace(
                create_verifier_from_config=lambda *_, **__: types.SimpleNamespace(verify=verify)
            )
        },
    }
    for name, members in names.items():
        parts = f"harbor.{name}".split(".")
        for size in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:size]), types.ModuleType(parts[size - 1]))
        module = types.ModuleType(parts[-1])
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, ".".join(parts), module)
    return made


@pytest.mark.parametrize(("count", "reward"), [("$(wc -l < names.txt)", 1.0), ("4", 0.0)])
def test_trls_harbor_environment_runs_unchanged(make_config, tmp_path, monkeypatch, count, reward):
    from trl.experimental.harbor._env import HarborBashEnv

    folder = tmp_path / "sandbox"
    folder.mkdir()
    (folder / "names.txt").write_text("Ann\nBo\nCy\n")
    sandboxes = stand_in(monkeypatch, folder)
    monkeypatch.setattr(HarborBashEnv, "PROMPT_SUFFIX", " Use bash.")  # the tiny model's context is short
    settings = {"max_turns": 3, "max_new_tokens": 100, "max_episode_tokens": 200, "top_k": 0, "top_p": 1.0}
    trainer = PPOTrainer(make_config(environment=HarborBashEnv, rewards=(), **settings))
    assert [*trainer.generator.environment.schemas] == ["bash"]
    said = call_of("bash", command=f"echo {count} > /workdir/answer.txt; cat answer.txt")
    results = scripted(trainer, said, "done").ppo_step([Prompt("x ", {"task_dir": str(folder)})])
    tokens = results["sa_pairs"].tokens
    assert [str(prompt) for prompt in tokens.prompts] == [f"x {INSTRUCTION} Use bash."]
    assert tokens.texts() == [f"{said}{3 if reward else 4}\ndone"]
    assert results["rewards"] == [reward]
    assert (results["episode_turns"], results["eos_rate"], results["malformed_calls"]) == (2, 1, 0)
    assert len(sandboxes) == 1
