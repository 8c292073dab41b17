"""docs/rewards.md is true beyond what `tests/docs` runs: what functions return, what YAML and HTTP hold."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from proxima.config import PPOConfig, RewardSpec
from proxima.core.types import Prompt
from proxima.rewards import ChatReward, Samples, check_rewards
from proxima.rewards.function_reward import FunctionReward
from proxima.rewards.gym_generators import ALLOWED, EXCLUDED
from proxima.rewards.http_reward import EndpointReward, read_reply
from proxima.rewards.ready_made_rewards import READY_MADE
from proxima.rewards.reward_server import read_batch
from proxima.rewards.verifiers import VERIFIERS
from proxima.rewards.worker_pool import WorkerPool
from proxima.rewards.worker_reward import WORKER_OPTIONS
from tests.docs.blocks import read_blocks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCKS = read_blocks(ROOT / "docs" / "rewards.md")


def blocks(kind):
    return [block.text for block in BLOCKS if block.language == kind]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder of its own, in which importing leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    yield tmp_path
    for name in ("my_rewards", "answers"):
        sys.modules.pop(name, None)


def test_the_functions_return_what_the_page_says():
    space: dict = {}
    for block in blocks("python"):
        exec(block, space)
    prompts = [Prompt("p", {"answer": "a"}), Prompt("q", {"answer": "b"})]
    given = Samples(prompts, ["a", "c c"], [[1], [2, 2, 3]], [True, False])
    outcomes = {
        name: FunctionReward(RewardSpec(space[name]), space[name])(given)
        for name in ("brevity", "exact", "no_stutter")
    }
    assert outcomes["brevity"].sequence == [-0.01, -0.03]
    assert outcomes["exact"].sequence == [1.0, 0.0]
    assert outcomes["no_stutter"].token == {0: [0.0], 1: [0.0, -0.1, 0.0]}


def test_rewards_in_yaml_on_the_page_are_taken(folder):
    for block in BLOCKS:
        if block.title:
            (folder / block.title).write_text(block.text)
    shown = blocks("yaml")
    assert len(shown) == 6
    for text in shown:
        check_rewards(PPOConfig.from_dict(yaml.safe_load(text)))


def test_request_and_reply_on_the_page_are_those_of_the_code():
    request, reply = (json.loads(block) for block in blocks("json"))
    read_batch(json.dumps(request).encode())
    prompts = [
        Prompt(text, {"answer": answer})
        for text, answer in zip(request["prompts"], request["columns"]["answer"], strict=True)
    ]
    given = Samples(prompts, request["completions"], [[1], [2]], [True, True])
    assert json.loads(EndpointReward("http://127.0.0.1/score")._body(given)) == request
    outcome = read_reply(json.dumps(reply).encode(), given)
    assert (outcome.sequence[0], outcome.failures) == (0.7, 1)


def test_the_page_names_every_ready_made_reward_and_every_option_with_its_default():
    import inspect

    assert all(f"`{name}`" in PAGE for name in (*READY_MADE, *VERIFIERS, *EXCLUDED, *WORKER_OPTIONS))
    assert f"{len(ALLOWED)} of the {len(ALLOWED) + len(EXCLUDED)} generators" in PAGE
    for name in inspect.signature(ChatReward).parameters:
        assert name == "url" or f"`{name}`" in PAGE.partition("## A language model")[2], name
    for name in WORKER_OPTIONS[1:]:
        default = inspect.signature(WorkerPool).parameters[name].default
        assert f"| `{name}` | {default:g} |" in PAGE, name
    for name, parameter in inspect.signature(EndpointReward).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = (
                "" if parameter.default == "" else f"{str(parameter.default).lower().removesuffix('.0')} "
            )
            assert f"| `{name}` | {default}|" in PAGE, name
