"""The examples: a small model learns them, and what cannot be run here works on a tiny one."""

import shutil

import pytest
from transformers import AutoTokenizer

from examples import calculator, chain_sum, guessing_game
from proxima.environments.episode_environment import Environment
from proxima.world.tiny_models import byte_tokenizer
from tests.environments.test_chat_templates import CHATML, template

BEST_CONSTANT = 2 / 3  # two of three words, whatever the game says


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_small_model_learns_the_guessing_game(seed):
    won = guessing_game.train(45, seed=seed)
    assert sum(won[-10:]) / 10 > 0.85 > BEST_CONSTANT
    assert won[0] < 0.6


def test_sums_are_asked_and_read(tiny, tmp_path):
    folder = tmp_path / "speaks"
    shutil.copytree(tiny, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template(CHATML).replace("<end>", tokenizer.eos_token)
    tokenizer.save_pretrained(folder)
    settings = {"batch_size": 4, "max_new_tokens": 4, "run_dir": str(tmp_path / "runs"), "token_samples": 0}
    found = chain_sum.main(1, str(folder), 4, max_episode_tokens=4, **settings)
    assert found["best constant"] == pytest.approx(1 / 9)
    assert 0 <= found["before"] <= 1
    game = chain_sum.ChainSum()
    left, _, right, _ = game.reset(seed=5).split()
    assert game.step(f"It is {int(left) + int(right)}.").reward == 1
    assert game.step("It is 99.").reward == 0
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
    calculator.write(tmp_path / "products.jsonl", 3)
    assert len((tmp_path / "products.jsonl").read_text().splitlines()) == 3
