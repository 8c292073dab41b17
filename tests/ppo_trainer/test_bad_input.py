"""Bad input gets a clear error or is counted; nothing is repaired silently and nothing is lost."""

import math
from pathlib import Path

import pytest
import torch

from proxima.config import PPOConfig
from proxima.core.errors import RewardFailure
from proxima.ppo_trainer import PPOTrainer
from proxima.reward_kl import RewardAdjuster

NAN = float("nan")
CONTEXT = 256  # of the tiny models


def lengths(prompts, texts):
    return [float(len(text)) + len(prompt) / 100 for prompt, text in zip(prompts, texts, strict=True)]


@pytest.fixture(scope="module")
def trainer(tiny_folders, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    config = PPOConfig(
        model_name=tiny_folders["qwen3"], rewards=(lengths,), max_new_tokens=4, ppo_epochs=1, run_dir=folder
    )
    return PPOTrainer(config)


@pytest.fixture
def build(make_config):
    """A trainer for one step with this reward."""
    return lambda reward, **settings: PPOTrainer(
        make_config(rewards=(reward,), max_new_tokens=4, ppo_epochs=1, **settings)
    )


# --- prompts ---


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        ("one text", "list of texts, got one text"),
        (["fine", ""], "prompt 1 is empty"),
        (["fine", " \n"], "prompt 1 is empty"),
        (["fine", None], "prompt 1 is a NoneType, not a text"),
        ([["a", "b"]], "prompt 0 is a list, not a text"),
        (
            ["fine", "x" * 253],
            r"prompt 1 has 253 tokens; with max_new_tokens \(4\) the context of 256 leaves 252",
        ),
    ],
)
@pytest.mark.parametrize("call", ["ppo_step", "train", "validation"])
def test_prompts_that_cannot_be_used_are_refused_before_anything_happens(trainer, prompts, message, call):
    calls = {
        "ppo_step": trainer.ppo_step,
        "train": trainer.train,
        "validation": lambda held_out: trainer.train(["fine"], validation_prompts=held_out),
    }
    before = trainer.step, sorted(Path(trainer.config.run_dir).iterdir())
    with pytest.raises(ValueError, match=message):
        calls[call](prompts)
    assert (trainer.step, sorted(Path(trainer.config.run_dir).iterdir())) == before  # no run was begun


def test_a_prompt_that_just_fits_is_used_whole(trainer):
    results = trainer.ppo_step(["x" * 252])
    assert results["truncated_prompts"] == 0
    assert results["sa_pairs"][0]["state"] == "x" * 252


def test_asked_for_truncation_cuts_on_the_left_and_counts(build):
    results = build(lengths, truncate_prompts=True).ppo_step(["ab" + "x" * 252, "short", "y" * 300])
    assert results["truncated_prompts"] == 2
    states = [pair["state"] for pair in results["sa_pairs"] if pair["position"] == 0]
    assert states == ["x" * 252, "short", "y" * 252]


def test_more_new_tokens_than_the_context_is_refused(trainer):
    short = PPOTrainer(PPOConfig(**{**vars(trainer.config), "max_new_tokens": CONTEXT}))
    with pytest.raises(ValueError, match=r"max_new_tokens \(256\) leaves no room"):
        short.ppo_step(["a"])


# --- rewards given by hand ---

PAIRS = [{"sequence": row, "position": at, "kl": 0.1} for row in range(2) for at in range(3)]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0], "1 rewards for 2 sequences"),
        ([1.0, 2.0, 3.0], "3 rewards for 2 sequences"),
        ([[1.0, 2.0, 3.0], [1.0, 2.0]], "sequence 1 has 3 tokens but 2 rewards"),
        ([1.0, NAN], "reward 1 is not finite"),
        ([-math.inf, 1.0], "reward 0 is not finite"),
        ([[0.0] * 3, [0.0, NAN, 0.0]], "reward 1 is not finite"),
    ],
)
def test_the_adjuster_refuses_rewards_of_wrong_length_or_value(rewards, message):
    with pytest.raises(ValueError, match=message):
        RewardAdjuster().adjust_rewards_with_kl(PAIRS, rewards, 0.1)


# --- rewards that fail ---


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_failed_sample_is_left_out_and_the_rest_trains_as_if_it_had_not_been_there(build, prompts, bad):
    def one_fails(given, texts):
        return [
            bad if prompt == prompts[1] else score
            for prompt, score in zip(given, lengths(given, texts), strict=True)
        ]

    others = [prompts[0], *prompts[2:]]
    trainer, reference = build(one_fails), build(lengths)
    results, expected = trainer.ppo_step(prompts), reference.ppo_step(others)
    assert results["failed_rewards"] == 1
    assert [math.isnan(reward) for reward in results["rewards"]] == [False, True, False, False]
    assert len(results["generated_texts"]) == 4
    assert results["sa_pairs"].tokens.prompts == others
    for name in ("avg_reward", "policy_loss", "value_loss", "advantage_std", "grad_norm_policy"):
        assert results[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    for one, other in zip(
        trainer.model_trainer.policy_parameters, reference.model_trainer.policy_parameters, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_reward_that_raises_once_is_tried_again(build, prompts):
    calls = []

    def flaky(given, texts):
        calls.append(len(given))
        if len(calls) == 1:
            raise ConnectionError("try later")
        return lengths(given, texts)

    results = build(flaky).ppo_step(prompts)
    assert calls == [4, 4]
    assert results["failed_rewards"] == 0


def raises(prompts, texts):
    raise ConnectionError("the judge is away")


def too_few(prompts, texts):
    return [1.0]


def all_nan(prompts, texts):
    return [NAN] * len(texts)


@pytest.mark.parametrize("reward", [raises, too_few, all_nan])
def test_when_all_rewards_fail_the_step_is_refused_and_nothing_is_trained(build, prompts, reward):
    trainer = build(reward)
    before = [parameter.clone() for parameter in trainer.model_trainer.policy_parameters]
    with pytest.raises(RewardFailure, match="all 4 rewards of step 1 failed"):
        trainer.ppo_step(prompts)
    assert trainer.step == 0
    assert all(
        torch.equal(a, b) for a, b in zip(before, trainer.model_trainer.policy_parameters, strict=True)
    )


def test_a_run_whose_rewards_fail_later_keeps_what_it_learned(build, tmp_path):
    calls = []

    def dies(prompts, texts):
        calls.append(1)
        return lengths(prompts, texts) if len(calls) == 1 else all_nan(prompts, texts)

    trainer = build(dies, batch_size=1, run_name="dies")
    with pytest.raises(RewardFailure):
        trainer.train(["a", "b"])
    folder = tmp_path / "runs" / "dies"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    assert (folder / "policy" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("form", ["graph", "tensor", "numpy"])
def test_rewards_may_come_as_arrays_and_with_a_graph_behind_them(build, prompts, form):
    scale = torch.ones((), requires_grad=True)

    def reward(given, texts):
        scores = torch.tensor(lengths(given, texts))
        return {"graph": scores * scale, "tensor": scores, "numpy": scores.numpy()}[form]

    results = build(reward).ppo_step(prompts * 3)  # two minibatches
    assert scale.grad is None
    assert math.isfinite(results["policy_loss"])


def test_without_a_reward_the_trainer_warns_and_says_untrained(make_config):
    with pytest.warns(UserWarning, match="no reward is configured"):
        trainer = PPOTrainer(make_config(rewards=(), max_new_tokens=2))
    results = trainer.ppo_step(["a"])
    assert results["reward_source"] == "untrained"
    assert math.isfinite(results["avg_reward"])


def test_compute_rewards_refuses_texts_that_do_not_match_the_prompts(trainer):
    with pytest.raises(ValueError, match="1 generated texts for 2 prompts"):
        trainer.reward_computer.compute_rewards(["a", "b"], ["c"])
    with pytest.raises(ValueError, match="no texts to score"):
        trainer.reward_computer.compute_rewards([])
