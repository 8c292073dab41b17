"""Best-of-n against an oracle that draws every subset; `proxima eval --best-of` and `generate --best-of`."""

import itertools
import json
import math
import random
import re
from dataclasses import replace

import pytest

from proxima.base_setup import BaseSetup
from proxima.cli import main
from proxima.config import PPOConfig
from proxima.core.errors import RewardFailure
from proxima.evaluator import best_of_kl, best_of_mean, powers_up_to
from proxima.pages.report import frontier, write_report
from proxima.ppo_trainer import PPOTrainer, SequenceGenerator, best_samples
from proxima.runs import Run

NAN = float("nan")


def oracle(groups, n):
    """The mean over prompts and over all subsets of n samples of what the one with the highest reward is
    worth."""
    means = []
    for group in groups:
        known = [pair for pair in group if not math.isnan(sum(pair))]
        best = [max(subset, key=lambda pair: pair[0])[1] for subset in itertools.combinations(known, n)]
        if best:
            means.append(sum(best) / len(best))
    return sum(means) / len(means) if means else NAN


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_the_mean_over_all_choices(n):
    draw = random.Random(n)
    groups = [[(draw.gauss(0, 1), draw.gauss(0, 1)) for _ in range(7)] for _ in range(4)]
    groups[1][2] = groups[1][4] = (NAN, 100.0)  # failed
    groups[2][3] = (0.5, NAN)  # the judge failed
    assert best_of_mean(groups, n) == pytest.approx(oracle(groups, n))


def test_no_prompt_with_enough_samples_is_not_a_number():
    assert math.isnan(best_of_mean([[(1.0, 1.0)]], 2))
    assert math.isnan(best_of_mean([], 1))


def test_the_kl_of_the_best_of_uniform_samples_is_the_bound():
    """With continuous rewards the density of the best of n over the sampled one is n u^(n-1)."""
    for n in (1, 2, 4, 64):
        steps = 200_000
        places = ((i + 0.5) / steps for i in range(steps))
        exact = (
            math.fsum((d := n * u ** (n - 1)) * math.log(d) for u in places if n * u ** (n - 1) > 0) / steps
        )
        assert best_of_kl(n) == pytest.approx(exact, abs=1e-3)
    assert best_of_kl(1) == 0


def test_counts_double_up_to_the_most():
    assert [powers_up_to(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def vowels(prompts, texts):
    return [sum(text.encode()) % 97 + sum(letter in "aeiou" for letter in text) / 2 for text in texts]


def consonants(prompts, texts):
    return [float(sum(letter.isalpha() and letter not in "aeiou" for letter in text)) for text in texts]


def often_fails(prompts, texts):
    return [None if len(text) % 2 else 1.0 for text in texts]


HERE = "tests.evaluator.test_best_of_n"
PROMPTS = ["one", "two", "one", "four"]


@pytest.fixture
def settings(tiny_folders):
    def make(**given):
        common = {"max_new_tokens": 6, "seed": 3, "device": "cpu", "rewards": (f"{HERE}:vowels",)}
        return PPOConfig(tiny_folders["qwen3"], **{**common, **given})

    return make


def test_the_best_sample_is_the_best_of_those_that_sampling_gives(settings, monkeypatch):
    config = settings()
    setup = BaseSetup(config)
    models, tokenizer = setup.models, setup.tokenizer
    repeated = [prompt for prompt in PROMPTS for _ in range(5)]
    texts = SequenceGenerator(models, tokenizer, config).sample(repeated).texts()
    expected = [
        max(texts[i : i + 5], key=lambda text: vowels([], [text])[0]) for i in range(0, len(texts), 5)
    ]
    found = best_samples(models, tokenizer, config, PROMPTS, 5)
    assert [text for text, _ in found] == expected
    assert [score for _, score in found] == vowels([], expected)
    monkeypatch.setattr("proxima.ppo_trainer.best_of_samples.ROWS", 10)  # parts change nothing
    assert best_samples(models, tokenizer, config, PROMPTS, 5) == found


def test_samples_whose_reward_failed_are_not_chosen_and_no_reward_at_all_is_an_error(settings):
    config = settings(rewards=(f"{HERE}:often_fails",))
    setup = BaseSetup(config)
    found = best_samples(setup.models, setup.tokenizer, config, ["one"], 16)
    assert [len(text) % 2 for text, _ in found] == [0]
    broken = settings(rewards=(lambda prompts, texts: [None] * len(texts),))
    with pytest.raises(RewardFailure, match="all 4 rewards of prompt 1 failed"):
        best_samples(setup.models, setup.tokenizer, broken, ["one"], 4)


@pytest.fixture
def run(settings, tmp_path):
    config = settings(batch_size=4, run_dir=str(tmp_path), run_name="run", learning_rate=1e-2)
    PPOTrainer(config).train(["a", "b", "c", "d"], 2, validation_prompts=["e", "f"])
    return tmp_path / "run"


def test_eval_writes_best_of_n_and_the_report_draws_it(run, tmp_path, capsys):
    (tmp_path / "held_out.txt").write_text("one\ntwo\nthree")
    words = ["--rewards", f"{HERE}:vowels", "--judges", f"{HERE}:consonants", "--best-of", "6"]
    main(["eval", str(run), "--data", str(tmp_path / "held_out.txt"), *words])
    rows = json.loads((run / "evaluation.json").read_text())["best_of"]
    assert [row["n"] for row in rows] == [1, 2, 4, 6]
    assert [row["kl"] for row in rows] == [best_of_kl(n) for n in (1, 2, 4, 6)]
    rewards = [row["reward"] for row in rows]
    assert rewards == sorted(set(rewards))
    assert all(row["judge/consonants"] >= 0 for row in rows)
    assert "best of 4 of the reference, KL at most 0.64" in capsys.readouterr().out
    drawn = frontier(Run(run).metrics(), Run(run).evaluation)
    assert [one["name"] for one in drawn["series"]][1:] == [
        "best of n samples of the reference",
        "the policy, by proxima eval",
    ]
    assert [point[:2] for point in drawn["series"][1]["points"]] == [
        [row["kl"], row["reward"]] for row in rows
    ]
    assert "best of 4" in write_report(Run(run)).read_text(encoding="utf-8")


@pytest.mark.parametrize("found", [3, {"n": 1}, [None, {"n": 1, "kl": "x", "reward": 2}], [{"n": 1}]])
def test_an_evaluation_with_something_else_under_that_name_draws_nothing_more(found):
    metrics = {"step": [1.0, 2.0], "avg_reward": [1.0, 2.0], "kl_exact": [0.1, 0.2]}
    assert len(frontier(metrics, {"best_of": found, "policy": 7})["series"]) == 1


def test_generate_chooses_by_the_rewards_of_the_adapters_run_or_says_what_is_missing(
    run, tiny_folders, capsys
):
    ask = ["generate", "--model-name", tiny_folders["qwen3"], "--prompt", "one", "--max-new-tokens", "6"]
    adapter = ["--adapter", str(run / "policy")]
    main([*ask, *adapter, "--best-of", "4", "--rewards", f"{HERE}:vowels"])
    assert "the best of 4" in capsys.readouterr().out
    for words, said in (
        ([], "--best-of 4 chooses by a reward, and there is none; give --rewards"),
        (adapter, "if you trust whoever made the run, add --rewards"),
    ):
        with pytest.raises(SystemExit):
            main([*ask, *words, "--best-of", "4"])
        assert said in capsys.readouterr().err
    config = PPOConfig.from_yaml(run / "config.yaml")
    replace(config, rewards=("ends_with_eos",)).to_yaml(run / "config.yaml")
    main([*ask, *adapter, "--best-of", "2"])
    assert "the best of 2" in capsys.readouterr().out
    game = ["--environment", "tests.environments.games:Once", "--max-turns", "1"]
    replace(config, rewards=(), environment=game[1]).to_yaml(run / "config.yaml")
    for words in (adapter, []):
        main([*ask, *words, "--best-of", "2", *game])
        assert "the best of 2" in capsys.readouterr().out


def test_the_best_of_a_weighted_mix_is_chosen_in_the_units_that_the_run_measured(settings):
    """A classifier of a large scale would outvote the other reward, which decided in training."""
    config = settings(rewards=(f"{HERE}:vowels", f"{HERE}:consonants"))
    setup = BaseSetup(config)
    units = {"consonants": [0.0, 1e9]}
    raw = best_samples(setup.models, setup.tokenizer, config, PROMPTS, 5)
    found = best_samples(setup.models, setup.tokenizer, config, PROMPTS, 5, {"units": units})
    alone = best_samples(setup.models, setup.tokenizer, settings(), PROMPTS, 5)
    assert [text for text, _ in found] == [text for text, _ in alone]
    assert [score for _, score in raw] != [score for _, score in found]
    assert best_samples(setup.models, setup.tokenizer, config, PROMPTS, 5, {"units": 3}) == raw


def test_generate_reads_the_units_of_the_adapters_run(run, tiny_folders, capsys):
    ask = ["generate", "--model-name", tiny_folders["qwen3"], "--prompt", "one", "--max-new-tokens", "6"]
    words = ["--adapter", str(run / "policy"), "--best-of", "4", "--rewards", f"{HERE}:vowels"]
    main([*ask, *words])
    raw = float(re.search(r"score (\S+),", capsys.readouterr().out)[1])
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**results, "units": {"vowels": [10.0, 2.0]}}))
    main([*ask, *words])
    found = float(re.search(r"score (\S+),", capsys.readouterr().out)[1])
    assert found == pytest.approx((raw - 10) / 2, rel=1e-3)
