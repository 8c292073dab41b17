"""The doctor's estimate decides as the run does: the same weights, passes, slots and chunk of logits."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from proxima.base_setup import (
    MicroBatches,
    cached_bytes,
    held_bytes,
    load_config,
    load_network,
    micro_batches,
    tokens_for_memory,
)
from proxima.config import FinetuningConfig, PPOConfig
from proxima.environments import max_response_tokens
from proxima.finetuning import Demonstration, Preference, RewardTrainer, SFTTrainer
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.engine import Decoder
from proxima.tools.doctor import memory_estimate
from proxima.tools.doctor.memory_estimate import base_without_weights, estimate_memory, network_size
from proxima.tools.doctor.resource_checks import other_networks
from proxima.tools.doctor.role_weights import role_weights
from tests.core.nf4_golden import GOLDEN
from tests.families.networks import tiny_network

MEMORY = 24 * 2**20
PROMPTS = ["x" * 40] * 8


@pytest.fixture
def decided(monkeypatch):
    """What each budget was made from, and the budget: first the run's, then the doctor's."""
    found, within = [], MicroBatches.within.__func__

    def note(cls, *given):
        found.append((given, within(cls, *given)))
        return found[-1][1]

    monkeypatch.setattr(MicroBatches, "within", classmethod(note))
    monkeypatch.setattr(micro_batches, "device_memory", lambda device: MEMORY)
    return found


@pytest.fixture
def adapters(tiny, tmp_path):
    """Folders of an SFT adapter and a reward model, each of a rank of its own."""
    base = {"model_name": tiny, "batch_size": 4, "run_dir": str(tmp_path / "fine")}
    sft = SFTTrainer(FinetuningConfig(**base, lora_r=3, run_name="sft")).train([Demonstration("a", " b")] * 8)
    pairs = [Preference(f"prompt {i}", " yes", " no") for i in range(8)]
    config = FinetuningConfig(**base, lora_r=5, lora_targets="q_proj,o_proj", run_name="reward")
    return {"sft_adapter": str(sft.folder), "rewards": (str(RewardTrainer(config).train(pairs).folder),)}


SETTINGS = {
    "adapters": {},
    "few modules": {"lora_r": 3, "lora_targets": "q_proj, v_proj"},
    "shared trunk": {"value_model": "policy"},
    "no value model": {
        "adv_estimator": "rloo",
        "num_generations": 2,
        "whiten_advantages": False,
        "value_learning_rate": PPOConfig.value_learning_rate,
    },
    "all weights": {"lora_r": 0},
    "4 bits": {"quantize": "nf4"},
    "4 bits, short": {"quantize": "nf4", "micro_batch_tokens": 100, "micro_batch_size": 3},
    "checkpointing": {"gradient_checkpointing": True, "micro_batch_tokens": 200},
}


def compare(config, decided):
    trainer = PPOTrainer(config)
    decided[1:] = []  # further networks have budgets of their own
    network, others = load_config(config.model_name), other_networks(config)
    estimate = estimate_memory(config, network, len(PROMPTS[0]), on_gpu=False, others=others, memory=MEMORY)
    (given, run), (planned_from, planned) = decided
    models = trainer.models
    learned = {
        id(weight): weight for role in (models.policy, models.value) if role for weight in role.parameters()
    }
    assert estimate.optimizer == 12 * sum(weight.numel() for weight in learned.values())
    for name in ("size", "tokens", "minibatch", "short", "chunk", "sampling"):
        assert getattr(planned, name) == getattr(run, name), name
    if not config.micro_batch_tokens:  # of a GPU with as much memory
        assert tokens_for_memory(given[2], replace(given[3], on_gpu=True)) == tokens_for_memory(
            planned_from[2], replace(planned_from[3], on_gpu=True)
        )
    return trainer, estimate


@pytest.mark.parametrize("name", SETTINGS)
def test_the_doctor_decides_as_the_run_does(name, make_config, decided):
    compare(make_config(batch_size=8, minibatch_size=4, **SETTINGS[name]), decided)


@pytest.mark.parametrize(
    "more", [{}, {"lora_r": 0}, {"value_model": "policy"}, {"value_model": "reward"}], ids=str
)
def test_saved_adapters_are_counted_as_they_are(more, make_config, adapters, decided):
    if more.get("value_model") == "reward":
        more = {"value_model": adapters["rewards"][0]}
    config = make_config(batch_size=8, minibatch_size=4, **{**adapters, **more})
    trainer, estimate = compare(config, decided)
    base = trainer.models.sft.backbone.network
    own = sum(weight.numel() for name, weight in base.named_parameters() if ".lora_" in name)
    assert estimate.adapters == 4 * own


def test_a_reward_model_of_all_weights_lends_the_value_model_a_network(make_config, tiny, tmp_path, decided):
    pairs = [Preference(f"prompt {i}", " yes", " no") for i in range(8)]
    config = FinetuningConfig(model_name=tiny, lora_r=0, batch_size=4, run_dir=str(tmp_path / "fine"))
    folder = str(RewardTrainer(config).train(pairs).folder)
    decided.clear()
    compare(make_config(rewards=(folder,), batch_size=8), decided)
    config = make_config(rewards=(folder,))
    roles = role_weights(config, base_without_weights(config, load_config(tiny), on_gpu=False))
    assert roles.networks
    assert roles.elsewhere


@pytest.mark.parametrize("name", ["adapters", "4 bits", "4 bits, short", "checkpointing"])
def test_a_step_takes_the_passes_and_the_cache_that_were_estimated(name, make_config, decided, monkeypatch):
    trainer, estimate = compare(make_config(batch_size=8, minibatch_size=4, **SETTINGS[name]), decided)
    config, forward, sizes = trainer.config, Decoder.hidden, []

    def note(*given):
        sizes.append(given[2].total if torch.is_grad_enabled() else 0)
        return forward(*given)

    monkeypatch.setattr(Decoder, "hidden", note)
    trainer.models.eos_ids = ()
    trainer.ppo_step(PROMPTS)
    base = base_without_weights(config, load_config(config.model_name), on_gpu=False)
    kept = memory_estimate._kept_bytes(config, network_size(base), on_gpu=False, width=4)
    assert estimate.activations == int(max(sizes) * kept)
    slots, each = trainer.models.policy.backbone.generation.cache_size
    assert estimate.cache == slots * each * cached_bytes(base)


def test_where_all_weights_train_the_cache_is_in_float32_whatever_the_base_is(make_config, decided):
    config = make_config(batch_size=8, minibatch_size=4, lora_r=0, dtype="bfloat16", micro_batch_tokens=200)
    trainer, estimate = compare(config, decided)
    trainer.models.eos_ids = ()
    trainer.generator.sample(PROMPTS)
    slots = trainer.models.policy.backbone.generation._slots
    assert estimate.cache == sum(each.numel() * each.element_size() for each in (*slots.keys, *slots.values))
    (_, run), _ = decided
    of_adapters = MicroBatches.within(make_config(dtype="bfloat16"), 4, *decided[0][0][2:])
    assert run.sampling.cache < of_adapters.sampling.cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["none", "nf4"])
def test_weights_are_counted_to_the_byte(form, dtype, tiny_folders):
    for folder in (tiny_folders["qwen3"], tiny_folders["llama"]):
        config = PPOConfig(model_name=folder, quantize=form, dtype=dtype)
        network = load_network(config, folder, torch.device("cpu"))
        assert held_bytes(base_without_weights(config, load_config(folder), on_gpu=True)) == held_bytes(
            network
        )


def test_modules_that_a_checkpoint_left_unquantised_are_counted_in_full():
    config = PPOConfig(model_name=str(GOLDEN / "bnb_checkpoint"), quantize="nf4", dtype="bfloat16")
    network = load_network(config, config.model_name, torch.device("cpu"))
    built = base_without_weights(config, load_config(config.model_name), on_gpu=True)
    assert held_bytes(built) == held_bytes(network)


def test_an_episode_is_as_long_as_its_turns():
    network = tiny_network("qwen3").config
    one, many = (
        PPOConfig(max_new_tokens=32, **more)
        for more in ({}, {"environment": "tests.environments.games:make", "max_turns": 4})
    )
    assert max_response_tokens(many) > max_response_tokens(one)
    sizes = [estimate_memory(config, network, 100).cache for config in (one, many)]
    longest = [-(-(100 + max_response_tokens(config)) // 64) for config in (one, many)]
    assert sizes[1] / sizes[0] == longest[1] / longest[0]


def test_the_reference_path_samples_all_sequences_at_once():
    network = tiny_network("qwen3").config
    fast, plain = (
        estimate_memory(
            PPOConfig(engine=engine, batch_size=300, max_new_tokens=64), network, 64, memory=2**30
        ).cache
        for engine in ("auto", "plain")
    )
    assert fast < plain


def test_what_is_left_where_memory_runs_out_again_and_again():
    network = tiny_network("qwen3").config
    config = PPOConfig(batch_size=64, minibatch_size=64, max_new_tokens=64)
    whole, least = (estimate_memory(config, network, 64, smallest=smallest) for smallest in (False, True))
    assert least.activations < whole.activations / 8
    assert least.cache <= whole.cache / 4


def test_an_adapter_is_counted_without_changing_the_network():
    network = tiny_network("llama")
    names = [name for name, _ in network.named_parameters()]
    config = PPOConfig(lora_r=7)
    counted = role_weights(config, network)
    assert [name for name, _ in network.named_parameters()] == names
    adapted = get_peft_model(network, LoraConfig(r=7, target_modules="all-linear", task_type="CAUSAL_LM"))
    own = sum(weight.numel() for name, weight in adapted.named_parameters() if ".lora_" in name)
    assert counted.adapters == 2 * own
    assert counted.trained == 2 * own + network.config.hidden_size + 1
