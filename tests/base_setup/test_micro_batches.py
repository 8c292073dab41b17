"""How many tokens a pass holds where nobody chose a number, and how many sequences are sampled at once."""

import math

import pytest
import torch

from proxima.base_setup import (
    MOMENTS,
    USUAL_TOKENS,
    MemoryAtHand,
    MicroBatches,
    config_number,
    micro_batches,
    tokens_for_memory,
)
from proxima.base_setup.memory_rules import sampling_for_memory
from proxima.config import PPOConfig
from proxima.models import Sampling
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.engine import SamplingMemory, cache_tokens, generation
from proxima.tools.bench import SHAPES
from proxima.tools.doctor import estimate_memory, resource_checks


@pytest.fixture
def network():
    """The shape of Qwen3-0.6B without its weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(Qwen3Config(**SHAPES["0.6B"]), dtype=torch.bfloat16)


def test_tokens_follow_from_the_devices_memory_up_to_a_limit(network):
    gib = 2**30

    def of(size, checkpointing=False, **at_hand):
        return tokens_for_memory(network, MemoryAtHand(size * gib, True, **at_hand), checkpointing)

    found = [of(size) for size in (140, 24, 16, 8, 2)]
    assert found[0] == USUAL_TOKENS  # an H200
    assert found == sorted(found, reverse=True)
    kept = 0.9 * 28 * 22_528 * 2  # bytes per token: inputs and outputs of a layer's seven maps
    assert found[3] == pytest.approx(0.4 * (8 * gib - 2 * 751_632_384) / kept, abs=256)
    assert all(tokens % 256 == 0 for tokens in found)
    assert found[-1] >= 256
    assert of(4, checkpointing=True) > 3 * of(4)
    assert of(4, adapters=gib) == of(3)
    assert of(4, beside=gib) == of(4)
    assert tokens_for_memory(network, MemoryAtHand(None, True)) == USUAL_TOKENS
    assert tokens_for_memory(network, MemoryAtHand(gib, False)) == USUAL_TOKENS


def test_a_chosen_number_stands_and_a_cpu_takes_the_usual_one(make_config):
    base = PPOTrainer(make_config()).models.policy.backbone
    assert MicroBatches.of(make_config(micro_batch_tokens=77), 8, base).tokens == 77
    assert MicroBatches.of(make_config(), 8, base).tokens == USUAL_TOKENS


GIB = 2**30


def pretend(monkeypatch, memory):
    """Let every device have this many bytes."""
    for module in (micro_batches, resource_checks):
        monkeypatch.setattr(module, "device_memory", lambda device: memory)


def test_slots_follow_from_the_devices_memory_and_the_doctor_knows_them(network):
    def slots_of(memory, longest, on_gpu=True, beside=0):
        return sampling_for_memory(network, MemoryAtHand(memory, on_gpu, beside)).slots(longest)

    config = PPOConfig(batch_size=64, minibatch_size=64, max_new_tokens=16_384)
    per_token = 2 * 28 * 8 * 128 * 2
    held = 2 * sum(weight.numel() for weight in network.parameters())
    for memory, slots in ((139 * GIB, 25), (80 * GIB, 14), (24 * GIB, 8), (2 * GIB, 8)):
        assert slots_of(memory, 16_640) == slots
        assert cache_tokens(memory, held, per_token) == max(0, memory - held) // 3 // per_token
        estimate = estimate_memory(config, network.config, longest_prompt=256, memory=memory)
        assert estimate.cache == slots * 16_640 * per_token
    assert estimate_memory(config, network.config, longest_prompt=256).cache == 64 * 16_640 * per_token
    assert slots_of(139 * GIB, 576) == 256  # short sequences are not bounded
    assert slots_of(139 * GIB, 16_640, beside=100 * GIB) == 8
    assert slots_of(2 * GIB, 16_640, on_gpu=False) == 1
    assert slots_of(None, 16_640) == 256


def cached_per_token(base):
    config = base.network.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def test_a_small_device_samples_the_same_in_fewer_slots_and_a_rerun_takes_as_many(make_config, monkeypatch):
    prompts, found = [f"prompt {i} " * (1 + i % 3) for i in range(9)], []
    for _ in range(2):
        for slots in (9, 4):
            trainer = PPOTrainer(make_config())  # only to know its size
            base = trainer.models.policy.backbone
            tokens = trainer.generator.read_prompts(prompts)
            need = -(-int(tokens.prompt_sizes.max() + 8) // 64) * 64
            held = sum(weight.numel() * weight.element_size() for weight in base.network.parameters())
            learned = [*trainer.models.policy.parameters(), *trainer.models.value.parameters()]
            held += MOMENTS * sum(weight.numel() for weight in learned)
            pretend(monkeypatch, held + 3 * (slots * need * cached_per_token(base) + 8))
            trainer = PPOTrainer(make_config())
            policy = trainer.models.policy
            sampled = policy.generate(tokens, Sampling(8, 1.0, 0, 1.0, (), 0, 0))
            assert policy.backbone.generation._slots.count == slots
            found.append(sampled.response_ids)
    assert all(torch.equal(each, found[0]) for each in found)


def test_out_of_memory_while_sampling_halves_the_slots_down_to_one_and_the_samples_stay(
    make_config, monkeypatch, caplog
):
    prompts = [f"prompt {i} " for i in range(9)]
    trainer = PPOTrainer(make_config(micro_batch_size=4))
    budget, most = trainer.models.micro_batches, [100]
    make = generation.new_slots

    def limited(count, *given):
        if count > most[0]:
            raise torch.cuda.OutOfMemoryError("made up")
        return make(count, *given)

    monkeypatch.setattr(generation, "new_slots", limited)
    whole = trainer.generator.sample(prompts)
    engine = trainer.models.policy.backbone.generation
    assert engine.cache_size[0] == 9
    engine._slots = None
    most[0] = 2
    again = trainer.generator.sample(prompts)
    assert torch.equal(again.response_ids, whole.response_ids)
    assert trainer.models.policy.backbone.generation.cache_size[0] == 2
    assert "sampling now has 2 slots" in caplog.text
    assert (budget.size, budget.tokens) == (4, USUAL_TOKENS)  # passes had no part in it
    trainer.ppo_step(prompts)
    assert trainer.models.policy.backbone.generation.cache_size[0] == 2  # it is not tried in vain again
    trainer.models.policy.backbone.generation._slots = None
    most[0] = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        trainer.generator.sample(prompts)


def test_out_of_memory_in_a_pass_that_cannot_be_halved_gives_it_the_memory_of_the_cache():
    budget, held = MicroBatches(8, 64, 8), [(12, 640)]
    budget.release = lambda: held.pop() if held else (0, 0)
    calls = []

    def work():
        calls.append(budget.sampling)
        if len(calls) == 1:
            raise torch.cuda.OutOfMemoryError("made up")

    budget.run(work, longest=640)
    assert calls == [SamplingMemory(math.inf, 1), SamplingMemory(6 * 640, 1)]
    calls.clear()
    with pytest.raises(torch.cuda.OutOfMemoryError):  # nothing is left to be freed
        budget.run(work, longest=640)


def test_a_size_that_a_config_refuses_to_say_is_0():
    """Of networks whose layers differ, such as Gemma 4."""

    class Config:
        hidden_size = 8
        name = "no number"

        @property
        def head_dim(self):
            raise RuntimeError("one for each layer")

    assert [config_number(Config(), name) for name in ("hidden_size", "head_dim", "name", "missing")] == [
        8,
        0,
        0,
        0,
    ]
