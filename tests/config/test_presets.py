"""Presets: values that settings take, by name, under files and flags."""

import dataclasses
from typing import get_args

import pytest
import yaml
from transformers import Qwen3Config

from proxima.cli import parse
from proxima.config import PRESETS, PPOConfig, Preset
from proxima.tools.doctor.memory_estimate import GIB, estimate_memory

GIVEN = ["--data", "prompts.txt", "--rewards", "ends_with_eos"]
OF_MODEL_AND_TASK = {
    "model_name", "lora_r", "lora_alpha", "batch_size", "max_new_tokens", "rewards", "seed", "temperature", "top_k", "top_p",
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_moves_settings_of_the_method_alone(name):
    made, plain = PPOConfig.from_preset(name), PPOConfig()
    moved = {key for key, value in made.to_dict().items() if value != getattr(plain, key) and value != []}
    assert moved == PRESETS[name].keys(), "a value that is the default does nothing"
    assert not moved & OF_MODEL_AND_TASK
    assert made.idle_settings == {}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_a_method_leaves_the_learning_rates_to_the_models_size(name):
    made = PPOConfig.from_preset(name)
    by_size = name != "16gb"
    assert (made.learning_rate == 0) == by_size
    assert (made.value_learning_rate == 0) == (by_size and made.has_critic)
    given = PPOConfig.from_preset(name, learning_rate=3e-4)
    assert given.learning_rate == 3e-4
    assert given.value_learning_rate == made.value_learning_rate


def test_memory_preset_by_the_doctors_estimate():
    """An 8B model and 512 + 512 tokens: 14 GiB, where the defaults need four times as much."""
    network = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    usual = {"batch_size": 16, "max_new_tokens": 512}
    configs = (PPOConfig.from_preset("16gb", **usual), PPOConfig(**usual))
    small, plain = (estimate_memory(config, network, longest_prompt=512).total / GIB for config in configs)
    assert small < 14
    assert plain > 4 * small


def test_every_preset_is_a_flag():
    assert get_args(Preset) == ("", *PRESETS)


@pytest.mark.parametrize("command", ["train", "doctor"])
@pytest.mark.parametrize("flag", [["--preset", "sao"], ["--preset=sao"]])
def test_flags_win_over_files_and_files_over_a_preset(tmp_path, command, flag):
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"preset": "grpo", "clip_epsilon": 0.25, "lam_alpha": 2.0}))
    found = parse([command, *GIVEN, *flag, "--config", str(path), "--lam-alpha", "3"])
    assert found.preset == "sao"
    expected = PPOConfig.from_preset("sao", clip_epsilon=0.25, lam_alpha=3.0, rewards=("ends_with_eos",))
    assert found.ppo == expected
    assert found.ppo.num_generations == 1, "the file's preset is not the flag's"


@pytest.mark.parametrize("flag", [["--preset", ""], ["--preset="]])
def test_an_empty_flag_takes_the_place_of_the_files_preset(tmp_path, flag):
    path = tmp_path / "own.yaml"
    path.write_text("preset: grpo\n")
    assert parse(["train", *flag, *GIVEN, "--config", str(path)]).ppo == PPOConfig(rewards=("ends_with_eos",))


def test_a_file_may_name_a_preset_and_none_is_the_defaults(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("preset: grpo\n")
    assert parse(["train", *GIVEN, "--config", str(path)]).ppo.adv_estimator == "grpo"
    assert PPOConfig.from_yaml(path) == PPOConfig.from_preset("grpo")
    path.write_text("preset: grpo\nnum_generations: 4\n")
    assert PPOConfig.from_yaml(path) == PPOConfig.from_preset("grpo", num_generations=4)
    assert parse(["train", *GIVEN]).ppo == PPOConfig(rewards=("ends_with_eos",))


@pytest.mark.parametrize("value", ["best", 3, ["sao"]])
def test_a_preset_that_is_none_is_refused_with_the_names_of_all(tmp_path, value):
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"preset": value}))
    with pytest.raises(ValueError, match=r"preset \(.*\) must be one of stable, fast, sao, grpo"):
        parse(["train", *GIVEN, "--config", str(path)])
    with pytest.raises(ValueError, match="must be one of"):
        PPOConfig.from_preset(str(value))


def test_a_run_writes_down_values_and_no_preset():
    names = {field.name for field in dataclasses.fields(PPOConfig)}
    assert "preset" not in names
    made = PPOConfig.from_preset("stable")
    assert PPOConfig.from_dict(made.to_dict()) == made
