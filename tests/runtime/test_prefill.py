"""Prefill: a pass whose size follows from a prompt alone, and what is filled up changes nothing."""

import random

import pytest
import torch

from proxima.models import Sampling
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.engine.layout import fill_up, pack, tile_table
from proxima.runtime.engine.prefill import PREFILL_TOKENS, prefill_passes
from tests.helpers import LOGPROB_ROUNDING, shake


def size_of_pass(size, most=PREFILL_TOKENS):
    (alone,) = prefill_passes([size], most, fixed=True)
    return alone.tokens, alone.reads


@pytest.mark.parametrize("most", [PREFILL_TOKENS, 512])
def test_every_pass_has_the_size_that_each_of_its_prompts_has_alone(most):
    rng = random.Random(0)
    for _ in range(100):
        sizes = [rng.randint(1, rng.choice((40, 700, 9000))) for _ in range(rng.randint(1, 64))]
        passes = prefill_passes(sizes, most, fixed=True)
        assert sorted(row for part in passes for row in part.rows) == list(range(len(sizes)))
        for part in passes:
            own = [sizes[row] for row in part.rows]
            assert {(part.tokens, part.reads)} == {size_of_pass(size, most) for size in own}
            assert sum(own) <= part.tokens <= max(most, max(own) + 511)
            assert len(own) <= part.reads


def test_few_prompts_take_a_small_pass_and_many_leave_little_of_theirs_empty():
    assert size_of_pass(20) == (512, 32)
    assert size_of_pass(512) == (8192, 32)
    assert size_of_pass(9000) == (9216, 1)
    sizes = [512] * 64
    assert sum(part.tokens for part in prefill_passes(sizes, PREFILL_TOKENS, fixed=True)) == sum(sizes)
    rng = random.Random(0)
    for low, high in ((64, 512), (300, 600), (10, 60)):
        sizes = [rng.randint(low, high) for _ in range(256)]
        passes = prefill_passes(sizes, PREFILL_TOKENS, fixed=True)
        assert sum(part.tokens for part in passes) < 1.3 * sum(sizes)


def test_a_layout_is_filled_up_behind_what_is_there():
    layout = pack(torch.tensor([3, 5, 2]), None, 6, torch.device("cpu"), read_last=True)
    full = fill_up(layout, 24, 4)
    assert full.lengths == (3, 5, 2, 5, 5, 4)
    assert full.starts.tolist() == [0, 3, 8, 10, 15, 20, 24]
    assert full.read.tolist() == [2, 7, 9, 0]
    assert full.rows[10:].tolist() == [3] * 5 + [4] * 5 + [5] * 4
    assert full.positions[10:].tolist() == [*range(5), *range(5), *range(4)]
    assert torch.equal(full.source[:10], layout.source)
    assert full.source[10:].unique().tolist() == [3]  # the first real token of the first row
    assert torch.equal(full.tiles, torch.from_numpy(tile_table(full.lengths)))
    same = fill_up(layout, 10, 3)
    assert (same.lengths, same.read.tolist()) == (layout.lengths, layout.read.tolist())


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_samples_of_filled_passes_are_those_of_others_and_sizes_follow_from_the_prompt(
    name, tiny_folders, make_config, monkeypatch
):
    """What a GPU does, on a CPU: batches of 3 and 12, and permuted."""
    trainer = shake(PPOTrainer(make_config(model_name=tiny_folders[name])))
    policy, texts = trainer.models.policy, [f"prompt {i} " * (1 + i % 6) for i in range(12)]
    generation, sizes = policy.backbone.generation, []
    run = generation.decoder.run

    def note(flat, layout, *given, **named):
        if named.get("read") is not None:
            sizes.append((len(flat), len(named["read"])))
        return run(flat, layout, *given, **named)

    monkeypatch.setattr(generation.decoder, "run", note)

    def sample(chosen):
        prompts = trainer.generator.read_prompts([texts[i] for i in chosen])
        sizes.clear()
        tokens = policy.generate(prompts, Sampling(6, 1.0, 0, 1.0, (), 0, 0))
        wanted = {size_of_pass(size) for size in prompts.prompt_sizes.tolist()}
        return tokens.response_ids, tokens.sampled_logprobs, set(sizes) == wanted

    assert not generation.fixed_passes
    plain = sample(range(12))
    assert not plain[2]
    generation.fixed_passes = True
    for chosen in (range(12), [3, 1, 8], [11, *range(11)]):
        ids, logprobs, by_prompt = sample(chosen)
        assert by_prompt
        assert torch.equal(ids, plain[0][list(chosen)])
        near = {"rtol": 0, "atol": LOGPROB_ROUNDING}
        torch.testing.assert_close(logprobs, plain[1][list(chosen)], **near)
