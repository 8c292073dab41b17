"""Models, tokenizers and adapters that cannot be used get one clear error; a missing pad token is added."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from proxima.base_setup import BaseSetup
from proxima.base_setup.tokenizer_setup import load_tokenizer
from proxima.ppo_trainer import PPOTrainer


@pytest.mark.parametrize("pad", [None, "<|endoftext|>"], ids=["no pad", "EOS as pad"])
def test_a_tokenizer_gets_a_pad_token_that_is_not_eos(tiny, tmp_path, pad):
    folder = shutil.copytree(tiny, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": pad}))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert tokenizer("ab c")["input_ids"] == load_tokenizer(tiny)("ab c")["input_ids"]


@pytest.mark.parametrize("name", ["no/such-model", "nowhere"])
def test_an_unknown_model_says_what_was_tried_and_how_to_run_offline(make_config, name):
    with pytest.raises(ValueError, match=f"'{name}'") as problem:
        BaseSetup(make_config(model_name=name))
    assert "Hugging Face id" in str(problem.value)
    assert "HF_HUB_OFFLINE" in str(problem.value)


def to_pickle(folder):
    from safetensors.torch import load_file

    [weights] = folder.glob("*model.safetensors")
    torch.save(
        load_file(weights),
        folder / ("adapter_model.bin" if "adapter" in weights.name else "pytorch_model.bin"),
    )
    weights.unlink()


def cut_short(folder):
    [weights] = folder.glob("*model.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])


@pytest.mark.parametrize("spoil", [to_pickle, cut_short])
def test_a_model_folder_without_sound_safetensors_is_refused(make_config, tiny, tmp_path, spoil):
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    spoil(folder)
    with pytest.raises(ValueError, match="safetensors") as problem:
        BaseSetup(make_config(model_name=str(folder)))
    assert str(folder) in str(problem.value)


@pytest.mark.parametrize("spoil", [to_pickle, cut_short])
@pytest.mark.parametrize("role", ["sft_adapter", "value_model", "rewards"])
def test_an_adapter_folder_without_sound_safetensors_is_refused(make_config, tmp_path, role, spoil):
    folder = PPOTrainer(make_config()).save(tmp_path / "saved") / (
        "policy" if role == "sft_adapter" else "value"
    )
    BaseSetup(make_config(**{role: str(folder)}))  # sound, it is used
    spoil(folder)
    with pytest.raises(ValueError, match="safetensors") as problem:
        BaseSetup(make_config(**{role: str(folder)}))
    assert str(folder) in str(problem.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mistral3", "'mistral3', which reads more than text"),
        ("qwen2_5_vl", "'qwen2_5_vl', which reads more than text"),
        ("llava", "'llava', which reads more than text, .* language model ('llama') only as a part"),
        ("t5", "'t5', of which transformers has no causal language model"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name_in_one_line(make_config, tiny, tmp_path, kind, said):
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    CONFIG_MAPPING[kind]().save_pretrained(folder)
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")) as problem:
        BaseSetup(make_config(model_name=str(folder)))
    assert len(str(problem.value)) < 600
    assert "\n" not in str(problem.value)
