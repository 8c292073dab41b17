"""Episodes of several turns on a GPU: the fast engine plays those of the reference path, whatever its slots and
the time that answers take, and they are trained on as they were sampled."""

import pytest
import torch

from proxima.config import PPOConfig
from proxima.ppo_trainer import PPOTrainer
from tests.environments.games import Parity, Slow
from tests.helpers import shake

DEVICE = "cuda"  # every line also runs with "cpu"
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

PROMPTS = [f"prompt number {i} " * (1 + i % 5) for i in range(12)]
EOS = tuple(range(0, 200, 5))  # turns of several lengths
ROUNDING = 1e-3  # logits of up to 10 in float32, by another library's products


def make(folder, **settings):
    given = {"environment": Parity, "rewards": (), "max_turns": 4, "max_new_tokens": 6, "device": DEVICE}
    given |= {"batch_size": 12, "minibatch_size": 6, "top_k": 20, "top_p": 1.0, "compile_layers": False}
    trainer = shake(PPOTrainer(PPOConfig(folder, **{**given, "dtype": "float32", **settings})), 0.02)
    trainer.models.eos_ids = EOS
    return trainer


@pytest.fixture(params=["qwen3", "llama", "gpt2"])
def folder(request, tiny_folders):
    return tiny_folders[request.param]


def played(tokens):
    """Of each episode, the ids without padding, which of them were chosen, and the rewards of its turns."""
    chosen = tokens.mask.tolist()
    return [
        (ids, own[: len(ids)], episode.rewards)
        for ids, own, episode in zip(tokens.response_rows, chosen, tokens.episodes, strict=True)
    ]


def test_the_fast_engine_plays_the_episodes_of_the_reference_path(folder):
    """Near ties may be rounded the other way, after which an episode is another one."""
    fast, plain = make(folder), make(folder, engine="plain")
    assert fast.models.policy.backbone.generation is not None
    assert plain.models.policy.backbone.generation is None
    ours, theirs = (trainer.generator.sample(PROMPTS) for trainer in (fast, plain))
    same = [
        row for row, pair in enumerate(zip(played(ours), played(theirs), strict=True)) if pair[0] == pair[1]
    ]
    assert len(same) >= 10
    assert min(sum(episode.rewards != [] for episode in each.episodes) for each in (ours, theirs)) == 12
    assert {len(episode.rewards) for episode in ours.episodes} == {3}
    for row in same:
        size = len(ours.response_rows[row])
        mask = ours.mask[row, :size]
        logprobs = [each.sampled_logprobs[row, :size][mask].cpu() for each in (ours, theirs)]
        torch.testing.assert_close(*logprobs, rtol=0, atol=4 * ROUNDING)


def test_hidden_states_of_whole_episodes_are_those_of_the_reference_path(folder):
    fast, plain = make(folder), make(folder, engine="plain")
    tokens = fast.generator.sample(PROMPTS)
    states = [trainer.models.policy.response_logits(tokens).detach().cpu() for trainer in (fast, plain)]
    read = tokens.mask.cpu()
    assert not read.all()
    torch.testing.assert_close(states[0][read], states[1][read], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_neither_slots_nor_slow_answers_are_seen_in_episodes(name, tiny_folders):
    folder, dtype = tiny_folders[name], "bfloat16"
    whole = make(folder, dtype=dtype)
    expected = played(whole.generator.sample(PROMPTS))
    assert len({len(ids) for ids, *_ in expected}) > 3
    few = make(folder, dtype=dtype, environment=Slow, step_seconds=30.0)
    few.models.policy.backbone.generation.max_slots = 4
    assert played(few.generator.sample(PROMPTS)) == expected
    assert played(whole.generator.sample(PROMPTS)) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_after_several_turns_is_one(folder, dtype):
    trainer = make(folder, dtype=dtype)
    for _ in range(2):
        results = trainer.ppo_step(PROMPTS)
        assert results["episode_turns"] == 3
        assert results["first_ratio_error"] < (1e-5 if DEVICE == "cuda" else 0.02)
        assert results["failed_rewards"] == 0
    engine = trainer.models.policy.backbone.generation
    assert DEVICE == "cpu" or engine.replays > 0  # the decode steps were CUDA graphs


def test_the_same_episodes_twice_give_the_same_bits(tiny_folders):
    found = []
    for _ in range(2):
        trainer = make(tiny_folders["qwen3"], dtype="bfloat16")
        results = [trainer.ppo_step(PROMPTS) for _ in range(2)]
        found.append([(each["generated_texts"], each["rewards"], each["policy_loss"]) for each in results])
    assert found[0] == found[1]
