"""All roles on a base in 4 bits: PPO, fine-tuning, resuming, export."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Crash, crash_at, difference, weights
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, Qwen3Config

from proxima.base_setup import load_network, pick_device, pick_dtype
from proxima.config import FinetuningConfig, PPOConfig, RewardConfig, saved_settings
from proxima.core.linear4bit import dequantize_layers, is_quantized
from proxima.core.nf4 import dequantize
from proxima.finetuning import Demonstration, Preference, RewardTrainer, SFTTrainer
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards.reward_server import load_scorer
from proxima.runs import Run
from proxima.tools import export
from proxima.tools.doctor.memory_estimate import estimate_memory

CPU = torch.device("cpu")


@pytest.fixture
def dequantized(tiny, tmp_path):
    """A checkpoint in float32 that holds what the tiny model is in 4 bits."""
    network = load_network(PPOConfig(model_name=tiny, quantize="nf4"), tiny, CPU)
    dequantize_layers(network, torch.float32)
    folder = tmp_path / "dequantized"
    network.save_pretrained(folder)
    for path in Path(tiny).glob("token*"):
        shutil.copy(path, folder)
    return str(folder)


@pytest.mark.parametrize("engine", ["auto", "plain"])
@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}, {"value_model": "policy"}])
def test_a_step_equals_one_on_the_dequantised_weights(make_config, prompts, dequantized, more, engine):
    """With the same bits, in all four roles, on either path."""
    found = []
    for settings in ({"quantize": "nf4"}, {"model_name": dequantized}):
        trainer = PPOTrainer(make_config(**settings, **more, engine=engine))
        results = trainer.ppo_step(prompts)
        assert results["first_ratio_error"] <= 1e-5
        found.append((weights(trainer), results["policy_loss"], results["value_loss"], results["kl_exact"]))
    assert found[0][1:] == found[1][1:]
    assert difference(found[0][0], found[1][0]) == 0


def test_first_ratio_in_bfloat16(make_config, prompts):
    trainer = PPOTrainer(make_config(quantize="nf4", dtype="bfloat16"))
    assert trainer.ppo_step(prompts)["first_ratio_error"] <= 1e-5


def test_all_roles_share_the_codes(make_config, prompts):
    trainer = PPOTrainer(make_config(quantize="nf4"))
    roles = (trainer.models.policy, trainer.models.sft, trainer.models.value, trainer.models.reward)
    assert len({id(role.backbone) for role in roles}) == 1
    assert is_quantized(roles[0].backbone.network)
    before = [
        part.detach().clone()
        for part in roles[0].backbone.network.parameters()
        if not part.is_floating_point()
    ]
    trainer.ppo_step(prompts)
    after = [part for part in roles[0].backbone.network.parameters() if not part.is_floating_point()]
    assert len(before) == 14
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_run_that_died_resumes_bit_exactly_and_says_what_it_trained_on(make_config):
    settings = {"batch_size": 2, "max_new_tokens": 4, "minibatch_size": 2, "checkpoint_every": 1}
    prompts, found = ["a", "b", "c", "d"], []
    for run in ("whole", "cut"):
        config = make_config(**settings, quantize="nf4", run_name=run)
        if run == "cut":
            with pytest.raises(Crash):
                crash_at(PPOTrainer(config), 1).train(prompts)
            torch.manual_seed(99)
        trainer = PPOTrainer(config)
        trainer.train(prompts, resume=run == "cut")
        found.append(weights(trainer))
    assert difference(*found) == 0
    assert PPOConfig.from_yaml(Path(config.run_dir) / "cut" / "config.yaml").quantize == "nf4"
    with pytest.raises(ValueError, match="quantize"):
        PPOTrainer(make_config(**settings, run_name="cut")).train(prompts, resume=True)


@pytest.fixture
def run(make_config, prompts):
    config = make_config(quantize="nf4", run_name="four", batch_size=4, learning_rate=0.05)
    PPOTrainer(config).train(prompts)
    return Path(config.run_dir) / "four"


def test_exported_adapter(run, tmp_path):
    export(run, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert "trained on the base in 4 bits" in (tmp_path / "adapter" / "README.md").read_text()


def test_exported_merged_model_is_the_dequantised_base_with_the_update(run, tmp_path):
    with pytest.warns(UserWarning, match="not the original model"):
        export(run, tmp_path / "merged", merge=True, dtype="float32")
    assert "not the original model" in (tmp_path / "merged" / "README.md").read_text()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    trainer = PPOTrainer(PPOConfig.from_yaml(run / "config.yaml"))
    trainer.models.policy.load(run / "policy")
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), trainer.models.policy.active():
        expected = trainer.models.policy.backbone.network(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recorded", ["bfloat16", "auto"])
def test_merged_into_the_codes_that_were_trained(make_config, prompts, tmp_path, recorded):
    """A float32 checkpoint trained in bfloat16 was quantised from bfloat16; `auto` is that where the run had a
    GPU."""
    config = make_config(quantize="nf4", dtype="bfloat16", run_name="four", batch_size=4)
    trainer = PPOTrainer(config)
    trainer.train(prompts)
    run = Path(config.run_dir) / "four"
    trainer.models.policy.load(run / "policy")
    if recorded == "auto":
        replace(PPOConfig.from_yaml(run / "config.yaml"), dtype="auto").to_yaml(run / "config.yaml")
        environment = json.loads((run / "environment.json").read_text())
        (run / "environment.json").write_text(json.dumps(environment | {"gpus": ["one"]}))
    with pytest.warns(UserWarning, match="not the original model"):
        export(run, tmp_path / "merged", merge=True, dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    policy, compared = trainer.models.policy, 0
    for path, part in policy.backbone.network.named_modules():
        if isinstance(part, LoraLayer):
            base, update = dequantize(part.get_base_layer().nf4), part.get_delta_weight(policy.adapter)
            assert torch.equal(merged.get_submodule(path).weight, base.float() + update.detach()), path
            compared += 1
    assert compared == 14
    embeddings = policy.backbone.network.get_input_embeddings().weight.float()
    assert torch.equal(merged.get_input_embeddings().weight, embeddings)


def test_memory_is_a_quarter_of_bfloat16():
    network = Qwen3Config(vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    sizes = {
        form: estimate_memory(PPOConfig(quantize=form), network, on_gpu=True) for form in ("none", "nf4")
    }
    assert 0.25 < sizes["nf4"].weights / sizes["none"].weights < 0.33
    assert sizes["nf4"].adapters == sizes["none"].adapters
    assert sizes["nf4"].activations == sizes["none"].activations


@pytest.fixture
def finetuning(tiny, tmp_path):
    return {
        "model_name": tiny,
        "quantize": "nf4",
        "learning_rate": 1e-2,
        "batch_size": 8,
        "lora_dropout": 0.0,
        "eval_every": 5,
        "epochs": 3,
        "run_dir": str(tmp_path / "fine"),
    }


def test_sft_and_reward_train_on_it_and_ppo_uses_both(finetuning, make_config, prompts):
    demonstrations = [Demonstration(f"say {letter}:", f" {letter * 4}") for letter in "abcdefgh"] * 6
    sft = SFTTrainer(FinetuningConfig(**finetuning, run_name="sft")).train(demonstrations)
    losses = [row["validation_loss"] for row in sft.metrics]
    assert losses[-1] < losses[0] / 2
    preferences = [
        Preference(f"prompt {i}", " yes" + "!" * (i % 3), " no" + "!" * (i % 4)) for i in range(60)
    ]
    config = RewardConfig(**finetuning, run_name="reward", sft_adapter=str(sft.folder))
    reward = RewardTrainer(config).train(preferences)
    assert reward.best["accuracy"] == 1.0

    served = PPOConfig(model_name=finetuning["model_name"], rewards=(str(reward.folder),))
    yes, no = load_scorer(served)({"prompts": ["prompt 1"] * 2, "completions": [" yes", " no"]})
    assert yes > no
    settings = {"quantize": "nf4", "sft_adapter": str(sft.folder), "rewards": (str(reward.folder),)}
    trainer = PPOTrainer(make_config(**settings))
    assert trainer.ppo_step(prompts)["first_ratio_error"] <= 1e-5


def test_fine_tuning_records_the_type_that_was_quantised(finetuning):
    made = {**finetuning, "epochs": 1, "batch_size": 4}
    folder = SFTTrainer(FinetuningConfig(**made, run_name="sft")).train([Demonstration("a", " b")] * 8).folder
    dtype = str(pick_dtype("auto", pick_device("auto"))).removeprefix("torch.")
    assert saved_settings(Path(folder) / "finetuning.yaml").dtype == dtype


@pytest.mark.parametrize(("trained", "own"), [("nf4", "none"), ("none", "nf4")])
def test_adapters_of_another_form_of_the_base_are_named(finetuning, make_config, prompts, trained, own):
    """Once each, in whichever role; nothing is said where the forms are the same, or none is recorded."""
    made = {**finetuning, "epochs": 1, "batch_size": 4, "quantize": trained}
    sft = SFTTrainer(FinetuningConfig(**made, run_name="sft")).train([Demonstration("a", " b")] * 8)
    preferences = [Preference(f"prompt {i}", " yes", " no") for i in range(8)]
    reward = RewardTrainer(RewardConfig(**made, run_name="reward")).train(preferences)
    folders = {"sft_adapter": str(sft.folder), "rewards": (str(reward.folder),)}

    def told(**settings):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            PPOTrainer(make_config(**{"quantize": own, **folders, **settings}))
        return [str(item.message) for item in caught if "was trained on" in str(item.message)]

    first, second = told()
    for said, folder in ((first, sft.folder), (second, reward.folder)):
        assert f"{str(folder)!r} was trained on" in said
        assert f"(quantize {trained})" in said
        assert f"(quantize {own})" in said
    assert len(told(value_model=str(reward.folder))) == 3
    assert told(quantize=trained) == []
    for folder in (sft.folder, reward.folder):
        (Path(folder) / "finetuning.yaml").unlink()
    assert told() == []


def test_run_reads_its_setting(run):
    assert Run(run).config["quantize"] == "nf4"
