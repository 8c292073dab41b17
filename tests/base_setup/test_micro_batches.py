"""How many tokens a pass holds where nobody chose a number."""

import pytest
import torch

from proxima.base_setup import USUAL_TOKENS, MicroBatches, tokens_for_memory
from proxima.ppo_trainer import PPOTrainer
from proxima.tools.bench import SHAPES


@pytest.fixture
def network():
    """The shape of Qwen3-0.6B without its weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(Qwen3Config(**SHAPES["0.6B"]), dtype=torch.bfloat16)


def test_tokens_follow_from_the_devices_memory_up_to_a_limit(network):
    gib = 2**30
    found = [tokens_for_memory(network, size * gib) for size in (140, 24, 16, 8, 2)]
    assert found[0] == USUAL_TOKENS  # an H200
    assert found == sorted(found, reverse=True)
    kept = 0.9 * 28 * 22_528 * 2  # bytes per token: inputs and outputs of a layer's seven maps
    assert found[3] == pytest.approx(0.4 * (8 * gib - 2 * 751_632_384) / kept, abs=256)
    assert all(tokens % 256 == 0 for tokens in found)
    assert found[-1] >= 256
    assert tokens_for_memory(network, 4 * gib, checkpointing=True) > 3 * tokens_for_memory(network, 4 * gib)


def test_a_chosen_number_stands_and_a_cpu_takes_the_usual_one(make_config):
    base = PPOTrainer(make_config()).models.policy.backbone
    assert MicroBatches.of(make_config(micro_batch_tokens=77), base).tokens == 77
    assert MicroBatches.of(make_config(), base).tokens == USUAL_TOKENS
