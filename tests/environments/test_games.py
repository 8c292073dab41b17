"""The examples: a small model learns them, and what cannot be run here works on a tiny one."""

import shutil
import sys
import time

import pytest
from transformers import AutoTokenizer

from examples import calculator, chain_sum, guessing_game
from proxima import Step
from proxima.environments.episode_environment import Environment
from proxima.rewards import WorkerProcess
from proxima.rewards.worker_process import pickled
from proxima.world.tiny_models import byte_tokenizer
from tests.environments.test_chat_templates import CHATML, template

BEST_CONSTANT = 2 / 3  # two of three words, whatever the game says


HEAVY = ("torch", "transformers", "datasets")
MODULES = ("guessing_game", "text_game", "chain_sum", "calculator", "my_rewards")


@pytest.mark.parametrize(
    "modules",
    [[f"examples.{name}" for name in MODULES], ["proxima.rewards.code_tests"], ["proxima.rewards.graders"]],
)
def test_a_process_of_an_environment_or_a_reward_loads_no_torch(modules):
    with WorkerProcess("sys:modules.__contains__", memory_mb=None, imports=modules) as worker:
        assert all(worker.call(None, name, timeout=20.0) for name in modules)
        assert [name for name in HEAVY if worker.call(None, name, timeout=20.0)] == []


def test_nor_does_one_that_gets_its_class_by_value():
    class Game:
        def step(self, text):
            return Step(reward=1.0, done=True)

        def loaded(self, names):
            return [name for name in names if name in sys.modules]

    with WorkerProcess(pickled(Game), memory_mb=None) as worker:
        assert worker.call("step", "a", timeout=20.0) == [None, 1.0, True]
        assert worker.call("loaded", HEAVY, timeout=20.0) == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_small_model_learns_the_guessing_game(seed):
    """Within three minutes of one core, whatever else the cores do."""
    began = time.process_time()
    won = guessing_game.train(45, seed=seed)
    assert time.process_time() - began < 180
    assert sum(won[-10:]) / 10 > 0.85 > BEST_CONSTANT
    assert won[0] < 0.6


def test_sums_are_asked_and_read(tiny, tmp_path):
    folder = tmp_path / "speaks"
    shutil.copytree(tiny, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template(CHATML).replace("<end>", tokenizer.eos_token)
    tokenizer.save_pretrained(folder)
    settings = {"batch_size": 4, "max_new_tokens": 4, "run_dir": str(tmp_path / "runs"), "token_samples": 0}
    found = chain_sum.main(3, 1, str(folder), 8, max_episode_tokens=4, **settings)
    assert {name for when in ("before", "after") for name in found[when]} == {
        "right",
        "right_unseen",
        "best_constant",
    }
    assert found["run"].endswith("chain-sum-3")
    assert 1 / 8 <= found["before"]["best_constant"] == found["after"]["best_constant"] <= 1


def test_sums_are_drawn_as_reasoning_gym_draws_them_and_some_are_kept_from_training():
    games = [chain_sum.ChainSum() for _ in range(2000)]
    trained = {game.reset(seed=seed, held_out=False) for seed, game in enumerate(games)}
    asked = {game.reset(seed=seed, held_out=True) for seed, game in enumerate(games)}
    assert asked == {f"{problem} =" for problem in chain_sum.PROBLEMS}
    assert len(asked) == 200
    assert trained == asked - {f"{problem} =" for problem in chain_sum.UNSEEN}
    assert len(trained) == 160
    game = games[0]
    for game.problem, right in (("9 + 8", 17), ("3 - 9", -6), ("0 - 0", 0)):
        assert game.step(f"With 1 and 2 it is {right}.").reward == 1
        assert game.step(f"{right} or {right + 1}").reward == 0
    assert game.step("No idea.").reward == 0


def test_the_calculator_is_a_tool(make_config, tmp_path):
    environment = Environment(make_config(tools=["examples.calculator:multiply"]), byte_tokenizer())
    schema = environment.schemas["multiply"]["function"]
    assert schema["parameters"]["properties"]["left"]["type"] == "integer"
    assert calculator.right_answer(["q"] * 3, ["It is 1,234.", "12 * 3 = 36", "none"], [1234, 35, 0]) == [
        1,
        0,
        0,
    ]
    said = '<tool_call>{"left": 12}</tool_call>\nuser\n<tool_response>\n36\n</tool_response>\nassistant\n'
    assert calculator.right_answer(["q"] * 2, [f"{said}No idea.", f"{said}It is 36."], [36, 36]) == [0, 1]
    calculator.write(tmp_path / "products.jsonl", 3)
    assert len((tmp_path / "products.jsonl").read_text().splitlines()) == 3
