"""Networks in 4 bits: quantised while loading, read from what bitsandbytes saved, and what is refused."""

import json
import shutil

import pytest
import torch
from gguf_cases import small_network, write_small
from safetensors.torch import load_file, save_file

from proxima.base_setup import MemoryAtHand, load_network, tokens_for_memory
from proxima.config import FinetuningConfig, PPOConfig
from proxima.core.linear4bit import Linear4bit
from proxima.core.nf4 import absmax_of, dequantize, quantize
from proxima.models import Backbone
from tests.core.nf4_golden import GOLDEN
from tests.families.networks import tiny_network

CPU = torch.device("cpu")


def load(folder, **settings):
    return load_network(
        PPOConfig(model_name=str(folder), **{"quantize": "nf4", **settings}), str(folder), CPU
    )


def layers(network):
    return {name: part for name, part in network.named_modules() if isinstance(part, Linear4bit)}


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_while_loading(tiny_folders, name, dtype):
    """Every linear layer but the head is what quantising its weight gives; all else is as it was."""
    full, made = load(tiny_folders[name], quantize="none", dtype=dtype), load(tiny_folders[name], dtype=dtype)
    found = layers(made)
    linears = [part for part in full.modules() if isinstance(part, torch.nn.Linear)]
    assert len(found) == len(linears) - 1
    for path, part in found.items():
        assert torch.equal(dequantize(part.nf4), dequantize(quantize(full.get_submodule(path).weight))), path
        assert part.nf4.dtype == getattr(torch, dtype)
    others = {name: w for name, w in full.named_parameters() if name.rpartition(".")[0] not in found}
    assert others
    for path, weight in others.items():
        assert torch.equal(weight, made.get_parameter(path)), path
    assert type(made.get_output_embeddings()) is torch.nn.Linear
    assert getattr(made.config, "quantization_config", None) is None


def test_a_backbone_knows_that_it_is_quantised(tiny):
    assert Backbone(load(tiny)).quantized
    assert not Backbone(load(tiny, quantize="none")).quantized


def test_memory_for_passes_counts_the_maps_in_full_and_logits_and_cache_beside_them(tiny):
    """The inputs and outputs of a layer's maps, 4 bytes each; an eighth of the logits of a token in 8 tables;
    four tokens of cache."""
    memory = MemoryAtHand(60 * 2**20, on_gpu=True)
    sizes = [tokens_for_memory(load(tiny, quantize=form), memory) for form in ("none", "nf4")]
    maps = (64 + 128) + 2 * (64 + 64) + (128 + 64) + 3 * (64 + 128)
    kept, beside = 0.9 * 2 * maps * 4, 8 * 257 * 4 / 8 + 4 * 2 * 2 * (2 * 32) * 4
    assert sizes[1] / sizes[0] == pytest.approx(kept / (kept + beside), rel=0.2)


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the golden checkpoint, to be spoiled."""
    return shutil.copytree(GOLDEN / "bnb_checkpoint", tmp_path / "checkpoint")


def test_checkpoint_of_bitsandbytes():
    made = load(GOLDEN / "bnb_checkpoint", dtype="bfloat16")
    expected = load_file(GOLDEN / "bnb_checkpoint" / "expected.safetensors")
    found = layers(made)
    assert len(found) == 6
    for name, weight in expected.items():
        path = name.removesuffix(".weight")
        own = dequantize(found[path].nf4) if path in found else made.get_parameter(name).data
        assert torch.equal(own, weight), name
    assert not any(path.endswith("o_proj") for path in found)  # llm_int8_skip_modules


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_checkpoint_of_bitsandbytes_in_another_type_than_it_was_saved_in(dtype):
    """It holds bfloat16 weights. Codes and scales are the same bytes; the product of value and absmax is rounded
    once, to the run's type. (bitsandbytes rounds it to bfloat16 first.)"""
    made = layers(load(GOLDEN / "bnb_checkpoint", dtype=str(dtype).removeprefix("torch.")))
    saved = load_file(GOLDEN / "bnb_checkpoint" / "model.safetensors")
    expected = load_file(GOLDEN / "bnb_checkpoint" / "expected.safetensors")
    for path, part in made.items():
        own, theirs = dequantize(part.nf4), expected[f"{path}.weight"]
        assert own.dtype == dtype
        assert torch.equal(part.nf4.codes, saved[f"{path}.weight"].flatten())
        assert torch.equal(part.nf4.absmax, saved[f"{path}.weight.absmax"])
        torch.testing.assert_close(own.float(), theirs.float(), rtol=2**-8 + 2**-11, atol=2**-25)
        if dtype == torch.float32:
            assert torch.equal(own.bfloat16(), theirs)
            assert not torch.equal(own, theirs.float())


def test_checkpoint_without_double_quantisation(checkpoint):
    """The same weights with float32 scales, as bitsandbytes writes them."""
    tensors = load_file(checkpoint / "model.safetensors")
    expected = layers(load(checkpoint))
    for path, part in expected.items():
        del tensors[f"{path}.weight.nested_absmax"], tensors[f"{path}.weight.nested_quant_map"]
        tensors[f"{path}.weight.absmax"] = absmax_of(part.nf4)
    save_file(tensors, checkpoint / "model.safetensors")
    for path, part in layers(load(checkpoint)).items():
        assert not part.nf4.nested
        assert torch.equal(dequantize(part.nf4), dequantize(expected[path].nf4))


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_quantised_checkpoint_needs_the_setting(checkpoint):
    with pytest.raises(ValueError, match=r"is quantised \(bitsandbytes, nf4, uint8\); set quantize to nf4"):
        load(checkpoint, quantize="none")


@pytest.mark.parametrize("absent", [True, False])
def test_storage_is_uint8_where_the_config_does_not_say(checkpoint, absent):
    """The default of bitsandbytes, for a key that is absent or null."""
    expected = layers(load(checkpoint))
    config = json.loads((checkpoint / "config.json").read_text())
    if absent:
        del config["quantization_config"]["bnb_4bit_quant_storage"]
    else:
        config["quantization_config"]["bnb_4bit_quant_storage"] = None
    (checkpoint / "config.json").write_text(json.dumps(config))
    found = layers(load(checkpoint))
    assert found.keys() == expected.keys()
    for path, part in found.items():
        assert torch.equal(dequantize(part.nf4), dequantize(expected[path].nf4))


@pytest.mark.parametrize(
    "changes",
    [
        {"bnb_4bit_quant_type": "fp4"},
        {"bnb_4bit_quant_storage": "bfloat16"},
        {"load_in_4bit": False, "load_in_8bit": True},
        {"quant_method": "gptq", "load_in_4bit": False},
    ],
)
def test_unknown_forms_are_refused(checkpoint, changes):
    change_config(checkpoint, **changes)
    with pytest.raises(ValueError, match="form that is not supported"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("skipped", "message"),
    [
        (["lm_head", "o_proj", "q_proj"], r"q_proj.weight' has shape .* named in llm_int8_skip_modules\?"),
        (["lm_head"], r"o_proj' is not quantised in the checkpoint, though its config does not name it"),
    ],
)
def test_skipped_modules_must_match(checkpoint, skipped, message):
    change_config(checkpoint, llm_int8_skip_modules=skipped)
    with pytest.raises(ValueError, match=message):
        load(checkpoint)


@pytest.mark.parametrize(
    ("part", "spoil", "message"),
    [
        ("absmax", lambda t: t[:-1], r"its absmax of a weight \(16, 16\) are 3 of torch.uint8, not 4"),
        ("nested_absmax", lambda t: t.half(), "nested_absmax"),
        ("quant_map", lambda t: t * 2, "table of 16 values"),
        ("quant_state.bitsandbytes__nf4", lambda t: t[:-3], "cannot be read"),
    ],
)
def test_spoilt_checkpoints_are_refused(checkpoint, part, spoil, message):
    tensors = load_file(checkpoint / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.weight.{part}"
    tensors[name] = spoil(tensors[name]).contiguous()
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(checkpoint)


def test_other_block_sizes_are_refused(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4"
    text = bytes(tensors[name].tolist()).replace(b'"blocksize": 64', b'"blocksize": 32')
    tensors[name] = torch.tensor(list(text), dtype=torch.uint8)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match="its blocksize is 32, and only 64 is supported"):
        load(checkpoint)


def test_gguf_file(tmp_path):
    path = str(write_small(tmp_path / "model.gguf", small_network("llama")))
    full, made = load(path, quantize="none"), load(path)
    assert len(layers(made)) == 7 * made.config.num_hidden_layers
    for name, part in layers(made).items():
        assert torch.equal(dequantize(part.nf4), dequantize(quantize(full.get_submodule(name).weight))), name


def test_transposed_layers_are_refused(tiny_folders):
    with pytest.raises(ValueError, match=r"gpt2 keeps its weights transposed \(Conv1D"):
        load(tiny_folders["gpt2"])


def test_a_model_that_reads_weights_directly_is_refused(tmp_path):
    """Said while loading, not by the first step; as it is it loads."""
    tiny_network("mamba").save_pretrained(tmp_path)
    load(tmp_path, quantize="none")
    with pytest.raises(ValueError, match="mamba does not run with its linear layers in 4 bits"):
        load(tmp_path)


def test_experts_in_one_tensor_are_refused(tmp_path):
    tiny_network("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the experts of qwen3_moe are one tensor \('.*experts"):
        load(tmp_path)


def test_a_model_of_embeddings_and_head_has_nothing_to_quantise(tmp_path):
    tiny_network("llama", num_hidden_layers=0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="nothing to quantise"):
        load(tmp_path)


@pytest.mark.parametrize("other", [{"lora_r": 0}, {"shard_base": True}, {"engine": "vllm"}])
def test_settings_that_do_not_go_together(other):
    with pytest.raises(ValueError, match=r"quantize nf4.*(lora_r|shard_base|vllm)"):
        PPOConfig(quantize="nf4", **other)


def test_finetuning_trains_adapters_only():
    with pytest.raises(ValueError, match="only adapters can be trained, but lora_r is 0"):
        FinetuningConfig(quantize="nf4", lora_r=0)
