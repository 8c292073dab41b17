"""docs/rewards.md is true: Python runs, YAML and commands parse, requests and replies have the form shown."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from proxima.cli import main, parse
from proxima.config import PPOConfig, RewardSpec
from proxima.rewards import Samples, check_rewards
from proxima.rewards.endpoint import EndpointReward, read_reply
from proxima.rewards.function import FunctionReward
from proxima.rewards.ready_made import READY_MADE
from proxima.rewards.server import read_batch
from proxima.types import Prompt

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder of its own, in which importing leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    yield tmp_path
    sys.modules.pop("my_rewards", None)


def test_the_first_example_trains(folder, tiny, capsys):
    (folder / "my_rewards.py").write_text(blocks("python")[0])
    (folder / "prompts.csv").write_text(blocks("csv")[0])
    words = shlex.split(blocks("bash")[0])
    assert words[0] == "proxima"
    main([*words[1:], "--run-name", "first", "--max-new-tokens", "2", "--ppo-epochs", "1"])
    assert "all epochs done" in capsys.readouterr().out
    assert "reward/brevity" in (folder / "runs" / "first" / "metrics.jsonl").read_text()


def test_the_functions_return_what_the_page_says():
    space: dict = {}
    for block in blocks("python"):
        exec(block, space)
    prompts = [Prompt("p", {"answer": "a"}), Prompt("q", {"answer": "b"})]
    given = Samples(prompts, ["a", "c c"], [[1], [2, 2, 3]], [True, False])
    outcomes = {
        name: FunctionReward(RewardSpec(space[name]), space[name])(given) for name in ("brevity", "exact", "no_stutter")
    }
    assert outcomes["brevity"].sequence == [-0.01, -0.03]
    assert outcomes["exact"].sequence == [1.0, 0.0]
    assert outcomes["no_stutter"].token == {0: [0.0], 1: [0.0, -0.1, 0.0]}


def test_yaml_and_commands_on_the_page_parse(folder):
    (folder / "my_rewards.py").write_text("\n".join(blocks("python")))
    for block in blocks("yaml"):
        check_rewards(PPOConfig.from_dict(yaml.safe_load(block)))
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(commands) == 4
    for line in commands:
        command = parse(shlex.split(line)[1:])
        if hasattr(command, "ppo"):
            check_rewards(command.ppo)


def test_request_and_reply_on_the_page_are_those_of_the_code():
    request, reply = (json.loads(block) for block in blocks("json"))
    read_batch(json.dumps(request).encode())
    prompts = [
        Prompt(text, {"answer": answer}) for text, answer in zip(request["prompts"], request["columns"]["answer"], strict=True)
    ]
    given = Samples(prompts, request["completions"], [[1], [2]], [True, True])
    assert json.loads(EndpointReward("http://127.0.0.1/score")._body(given)) == request
    outcome = read_reply(json.dumps(reply).encode(), given)
    assert (outcome.sequence[0], outcome.failures) == (0.7, 1)


def test_the_page_names_every_ready_made_reward_and_every_option_with_its_default():
    import inspect

    assert all(f"`{name}`" in PAGE for name in READY_MADE)
    for name, parameter in inspect.signature(EndpointReward).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = "" if parameter.default == "" else f"{str(parameter.default).lower().removesuffix('.0')} "
            assert f"| `{name}` | {default}|" in PAGE, name
