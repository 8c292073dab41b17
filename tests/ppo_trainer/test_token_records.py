"""Token records: every number of a few samples at each evaluation, equal to what the step computed, and
training never notices."""

import json
import math
from pathlib import Path

import pytest
import torch

from proxima.advantage import compute_advantages
from proxima.evaluator.held_out import VALIDATION_STEP
from proxima.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.token_records import pieces, rounded
from tests.conftest import count_e
from tests.helpers import difference, weights
from tests.ppo_trainer.test_resume import noisy, seed_all

ALL = ["logprob", "logprob_ref", "kl", "reward", "value", "td_error", "advantage", "return"]


def read(folder: Path) -> dict[int, list[dict]]:
    found = [json.loads(path.read_text()) for path in sorted((folder / "tokens").iterdir())]
    return {record["step"]: record["samples"] for record in found}


def few_on_b(prompts, texts):
    return [
        math.nan if prompt == "b" else count_e([prompt], [text])[0]
        for prompt, text in zip(prompts, texts, strict=True)
    ]


@pytest.fixture
def settings(make_config):
    return lambda **more: make_config(
        **{"batch_size": 3, "ppo_epochs": 2, "minibatch_size": 2, "token_samples": 2, **more}
    )


def test_the_same_prompts_are_followed_and_the_steps_own_are_beside_them(settings, prompts):
    results = PPOTrainer(settings()).train(prompts, 2, ["held out", "another", "not followed"])
    steps = read(results.run_folder)
    assert list(steps) == [0, 1, 2, 3, 4]
    for samples in steps.values():
        assert [sample["prompt"] for sample in samples[:2]] == ["held out", "another"]
        assert {sample["prompt"] for sample in samples[2:]} <= set(prompts)
        for sample in samples:
            followed = sample["kind"] == "followed"
            assert list(sample["columns"]) == ALL + ([] if followed else ["ratio", "clipped"])
            assert (
                {len(column) for column in sample["columns"].values()}
                == {len(sample["ids"])}
                == {len(sample["tokens"])}
            )
            assert (
                sample["reward"]
                == rounded(count_e([""], [sample["text"]])[0])
                == sample["rewards"]["count_e"]
            )
    assert [len(samples) for samples in steps.values()] == [
        2,  # before the first step nothing was trained on
        4,
        3,
        4,
        3,
    ]  # the second batch of an epoch has one prompt
    rows = [json.loads(line) for line in (results.run_folder / "samples.jsonl").read_text().splitlines()]
    followed = [row for row in rows if row["kind"] == "followed"]
    records = [sample for samples in steps.values() for sample in samples if sample["kind"] == "followed"]
    assert [(row["prompt"], row["text"]) for row in followed] == [
        (record["prompt"], record["text"]) for record in records
    ]
    assert followed[0]["kl"] == pytest.approx(math.fsum(records[0]["columns"]["kl"]), abs=1e-4)


def test_without_validation_prompts_the_first_training_prompts_are_followed(settings, prompts):
    steps = read(PPOTrainer(settings(eval_every=2)).train(prompts, 2).run_folder)
    assert list(steps) == [2, 4]
    for samples in steps.values():
        assert [sample["prompt"] for sample in samples if sample["kind"] == "followed"] == prompts[:2]


@pytest.mark.parametrize("target", ["reward_to_go", "lambda_return"])
def test_followed_numbers_follow_from_each_other_by_the_formulas(settings, prompts, target):
    config = settings(value_target=target, missing_eos_penalty=0.5, normalize_rewards=True, clip_rewards=0.7)
    trainer = PPOTrainer(config)
    sample = read(trainer.train(prompts).run_folder)[2][0]
    columns, score = sample["columns"], min(sample["reward"] - 0.5 * (not sample["ended"]), 0.7)
    size = len(sample["ids"])
    kl = [a - b for a, b in zip(columns["logprob"], columns["logprob_ref"], strict=True)]
    rewards = [-config.kl_coef * x + (score if i == size - 1 else 0) for i, x in enumerate(kl)]
    advantages, lambda_returns = compute_advantages([*rewards], columns["value"], config.gamma, config.lam)
    togo = [sum(config.gamma ** (j - i) * rewards[j] for j in range(i, size)) for i in range(size)]
    following = [*columns["value"][1:], 0.0]
    errors = [r + config.gamma * b - a for r, a, b in zip(rewards, columns["value"], following, strict=True)]
    for name, expected in (
        ("kl", kl),
        ("reward", rewards),
        ("td_error", errors),
        ("advantage", advantages),
        ("return", togo if target == "reward_to_go" else lambda_returns),
    ):
        assert columns[name] == pytest.approx(expected, abs=1e-4), name


def test_followed_answers_are_the_policys_after_the_update_with_the_noise_of_validation(settings, prompts):
    trainer = PPOTrainer(settings())
    last = read(trainer.train(prompts, 1, ["held out"]).run_folder)[2][0]
    tokens = trainer.generator.sample(["held out"], VALIDATION_STEP)
    assert last["ids"] == tokens.response_ids[0][tokens.mask[0]].tolist()
    scored = trainer.generator.score(tokens)
    assert last["columns"]["logprob"] == pytest.approx(scored["logprob_policy"][0].tolist(), abs=1e-4)


def test_trained_numbers_are_those_of_the_step_and_ratios_those_after_it(settings, prompts):
    config = settings(learning_rate=2e-2, eval_every=2, batch_size=4, clip_epsilon=0.05)
    trainer = PPOTrainer(config)
    outcomes = []
    step = trainer.ppo_step
    trainer.ppo_step = lambda batch: outcomes.append(step(batch)) or outcomes[-1]
    samples = read(trainer.train(prompts, 2).run_folder)[2]
    pairs = outcomes[1]["sa_pairs"]
    trained = [sample for sample in samples if sample["kind"] == "trained"]
    new = trainer.generator.score(pairs.tokens)["logprob_policy"]
    ratios, held = [], []
    for i, sample in enumerate(trained):
        real = pairs.mask[i]
        for name in ("kl", "reward", "value", "advantage", "return"):
            assert sample["columns"][name] == pytest.approx(
                pairs.column(name)[i][real].tolist(), rel=1e-4, abs=1e-5
            )
        ratio = torch.exp(new[i] - pairs.column("logprob_policy")[i])[real].tolist()
        assert sample["columns"]["ratio"] == pytest.approx(ratio, rel=1e-4)
        expected = [
            int((a > 0 and r > 1.05) or (a < 0 and r < 0.95))
            for r, a in zip(ratio, sample["columns"]["advantage"], strict=True)
        ]
        assert sample["columns"]["clipped"] == expected
        ratios += ratio
        held += expected
    assert max(abs(ratio - 1) for ratio in ratios) > 0.01  # the update can be seen
    assert 0 < sum(held) < len(held)


@pytest.mark.parametrize("held_out", [None, ["held out"]], ids=["training prompts", "held out"])
def test_training_is_the_same_to_the_last_bit_with_and_without_records(settings, prompts, held_out):
    runs = []
    for count in (0, 3):
        seed_all()
        trainer = PPOTrainer(
            settings(token_samples=count, rewards=(noisy,), run_name=f"run-{count}", eval_every=1 + count)
        )
        results = trainer.train(prompts, 3, held_out)
        runs.append((weights(trainer), results))
    assert difference(runs[0][0], runs[1][0]) == 0
    names = ("avg_reward", "kl", "policy_loss", "buffer_bytes", "advantage_std")
    curves = [[[step[name] for name in names] for step in results.metrics] for _, results in runs]
    assert curves[0] == curves[1]
    assert not (runs[0][1].run_folder / "tokens").exists()


def test_a_failed_reward_is_null_and_so_is_all_that_hangs_on_it(settings):
    config = settings(rewards=(few_on_b,), max_reward_failures=0.9)
    text = (
        PPOTrainer(config).train(["a", "c", "d"], 1, ["a", "b"]).run_folder / "tokens" / "step-00000001.json"
    )
    assert "NaN" not in text.read_text()
    good, failed, *_ = json.loads(text.read_text())["samples"]
    assert (failed["reward"], failed["rewards"]) == (None, {"few_on_b": None})
    size = len(failed["ids"])
    for name, column in failed["columns"].items():
        assert (column == [None] * size) == (name in ("reward", "td_error", "advantage", "return"))
    assert None not in good["columns"]["advantage"]


def test_a_step_with_failed_rewards_records_only_what_was_trained_on(settings):
    config = settings(rewards=(few_on_b,), max_reward_failures=0.9)
    folder = PPOTrainer(config).train(["a", "b", "c"]).run_folder
    trained = [sample for sample in read(folder)[1] if sample["kind"] == "trained"]
    assert {sample["prompt"] for sample in trained} == {"a", "c"}
    for sample in trained:
        assert sample["reward"] == rounded(count_e([""], [sample["text"]])[0])
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {row["prompt"]: row["reward"] for row in rows if row["kind"] == "trained"}["b"] is None


def test_the_pieces_of_an_answer_give_its_text(tiny_folders, settings):
    for name, folder in tiny_folders.items():
        trainer = PPOTrainer(settings(model_name=folder))
        decode = trainer.tokenizer.decode
        for text in ("Grüße, 世界! 👩‍👩‍👧 a\u202eb\n\n  tab\t", "x", ""):
            ids = trainer.tokenizer(text, add_special_tokens=False)["input_ids"]
            parts = pieces(ids, decode)
            assert len(parts) == len(ids)
            assert "".join(parts) == decode(ids), name


def test_broken_bytes_are_shown_soon_and_cost_no_more_than_their_length():
    seen = []

    def decode(ids, skip_special_tokens):
        seen.append(len(ids))
        return "\ufffd" * len(ids)

    parts = pieces(list(range(1000)), decode)
    assert len(parts) == 1000
    assert "".join(parts) == "\ufffd" * 1000
    assert max(seen) <= 8


def test_files_after_the_step_gone_back_to_are_removed(settings, prompts):
    from proxima.runs.run_writer import RunFolder

    config = settings(run_name="cut")
    folder = PPOTrainer(config).train(prompts, 2).run_folder
    (folder / "tokens" / ".step-00000003.json.part").write_text("{")
    with RunFolder(config, resume=True) as run:
        run.begin(2)
        assert [path.name for path in sorted((folder / "tokens").iterdir())] == [
            "step-00000001.json",
            "step-00000002.json",
        ]
