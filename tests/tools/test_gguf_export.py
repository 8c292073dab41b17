"""`proxima export --gguf`: files that this package and `transformers` read again, within the rounding of their
form."""

import json
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_cases import small_network, storage_error, write_small
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from proxima.base_setup.gguf_files import read_gguf
from proxima.base_setup.gguf_networks import LLAMA3_ROPE, rotated_heads
from proxima.base_setup.loading import load_config, load_network
from proxima.base_setup.tokenizer_setup import PROBES, eos_token_ids, load_tokenizer
from proxima.cli import main
from proxima.config import PPOConfig
from proxima.ppo_trainer import PPOTrainer
from proxima.tools.gguf_export import as_stored, write_gguf
from proxima.tools.model_export import export

ARCHITECTURES = ("llama", "qwen2", "qwen3")
TEXTS = (*PROBES, "1234567 a1b22  \n\n x\t", "It's 3 o'clock<|endoftext|> don't <|pad|>", "", "  ")
CPU = torch.device("cpu")


def load(path):
    return load_network(PPOConfig(dtype="float32"), str(path), CPU)


@pytest.mark.parametrize("form", ["f16", "q8_0"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_written_file_is_read_again_within_the_rounding_of_its_form(tmp_path, architecture, form):
    settings = {"head_dim": 128} if architecture == "qwen3" else {}  # what transformers takes for granted
    network, tokenizer = small_network(architecture, **settings), load_tokenizer("embedded")
    write_gguf(network, tokenizer, tmp_path / "a.gguf", form, "a")
    assert [file.name for file in tmp_path.iterdir()] == ["a.gguf"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    for loaded in (load(tmp_path / "a.gguf"), theirs):
        state = loaded.state_dict()
        for name, weight in network.state_dict().items():
            assert ((state[name] - weight).abs() <= storage_error(weight, form)).all(), name
    kinds = {
        tensor.kind
        for tensor in read_gguf(str(tmp_path / "a.gguf")).tensors.values()
        if len(tensor.shape) > 1
    }
    assert kinds == {int(gguf.GGMLQuantizationType[form.upper()])}
    for made in (
        load_tokenizer(str(tmp_path / "a.gguf")),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf"),
    ):
        for text in TEXTS:
            assert made(text)["input_ids"] == tokenizer(text)["input_ids"]


@torch.no_grad()
def test_a_file_of_f16_writes_what_the_network_writes(tmp_path):
    """The embedded model's weights are bfloat16 of moderate size, which f16 holds but for subnormal ones."""
    network, tokenizer = load("embedded"), load_tokenizer("embedded")
    write_gguf(network, tokenizer, tmp_path / "a.gguf", "f16", "a")
    loaded = load(tmp_path / "a.gguf")
    ids = tokenizer("SUBREDDIT: r/pets TITLE: cat POST: my cat is ill TL;DR:", return_tensors="pt")[
        "input_ids"
    ]
    compared = 0
    for _ in range(24):
        ours, theirs = network(ids).logits[0, -1], loaded(ids).logits[0, -1]
        gap = (ours - theirs).abs().max()
        first, second = ours.topk(2).values
        assert gap < 0.01
        if first - second > 2 * gap:
            assert ours.argmax() == theirs.argmax()
            compared += 1
        ids = torch.cat([ids, ours.argmax().reshape(1, 1)], 1)
    assert compared > 12
    assert eos_token_ids(load_tokenizer(str(tmp_path / "a.gguf")), loaded) == eos_token_ids(
        tokenizer, network
    )


def test_scaled_rotary_embeddings_ends_and_templates_are_written(tmp_path):
    tokenizer = load_tokenizer("embedded")
    tokenizer.chat_template = "{{ messages[0].content }}"
    llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, **LLAMA3_ROPE}
    for name, rope in (("a", llama3), ("b", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})):
        network = small_network("llama", rope_parameters=rope, eos_token_id=[0, 5])
        write_gguf(network, tokenizer, tmp_path / f"{name}.gguf", "f16", "a")
        assert load_config(str(tmp_path / f"{name}.gguf")).rope_parameters == rope
        made = load_tokenizer(str(tmp_path / f"{name}.gguf"))
        assert eos_token_ids(made, load(tmp_path / f"{name}.gguf")) == (0, 5)
        assert made.chat_template == tokenizer.chat_template


def test_rows_that_are_no_whole_blocks_stay_f16(tmp_path):
    network = small_network("qwen2", intermediate_size=48)
    write_gguf(network, load_tokenizer("embedded"), tmp_path / "a.gguf", "q8_0", "a")
    tensors = read_gguf(str(tmp_path / "a.gguf")).tensors
    assert (tensors["blk.0.ffn_down.weight"].kind, tensors["blk.0.ffn_up.weight"].kind) == (1, 8)


def test_more_embeddings_than_tokens_are_named_and_stay_unused(tmp_path):
    write_gguf(
        small_network("qwen2", vocab_size=840), load_tokenizer("embedded"), tmp_path / "a.gguf", "f16", "a"
    )
    file = read_gguf(str(tmp_path / "a.gguf"))
    assert file.metadata["tokenizer.ggml.tokens"][-1] == "[PAD839]"
    assert file.metadata["tokenizer.ggml.token_type"][-4:].tolist() == [1, 5, 5, 5]
    assert load(tmp_path / "a.gguf").get_input_embeddings().num_embeddings == 840


def test_rows_of_heads_are_put_in_turns_for_llama_alone():
    llama, qwen = (small_network(name).config for name in ("llama", "qwen2"))
    names = (
        "blk.0.attn_q.weight",
        "blk.1.attn_k.bias",
        "blk.0.attn_v.weight",
        "output.weight",
        "attn_q.weight",
    )
    assert [rotated_heads(llama, name) for name in names] == [4, 2, 0, 0, 0]
    assert not any(rotated_heads(qwen, name) for name in names)


def words_tokenizer():
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="b")


def odd_tokenizer():
    made = load_tokenizer("embedded")
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("e", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


def infinite():
    network = small_network("llama")
    network.model.layers[1].mlp.up_proj.weight.data[0, 0] = 70000.0
    return network


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
CANNOT = {
    "activation": (lambda: small_network("llama", hidden_act="gelu"), None, "with hidden_act = 'gelu'"),
    "window": (
        lambda: small_network("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0),
        None,
        "with (layer_types|use_sliding_window)",
    ),
    "yarn": (lambda: small_network("llama", rope_parameters=YARN), None, "rope scaling 'yarn'"),
    "too large": (infinite, None, r"'blk.1.ffn_up.weight' do not fit f16: they hold 70000"),
    "words": (lambda: small_network("llama"), words_tokenizer, "only a byte-level BPE tokenizer"),
    "cuts": (lambda: small_network("llama"), odd_tokenizer, "cuts texts as no GGUF file can say"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_a_file_cannot_say_is_refused_and_nothing_is_left(tmp_path, case):
    network, tokenizer, message = CANNOT[case]
    with pytest.raises(ValueError, match=message):
        write_gguf(
            network(), (tokenizer or (lambda: load_tokenizer("embedded")))(), tmp_path / "a.gguf", "f16", "a"
        )
    assert list(tmp_path.iterdir()) == []


# --- the whole pipeline ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A GGUF base, and data."""
    folder = tmp_path_factory.mktemp("gguf")
    network = small_network("llama", initializer_range=0.2)
    write_small(folder / "base.gguf", network, gguf.GGMLQuantizationType.Q8_0)
    rows = [{"prompt": f"what is {n}? ", "completion": f"it is {n}."} for n in range(6)]
    (folder / "demos.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"prompt": f"what is {n}? ", "chosen": f"it is {n}.", "rejected": "no"} for n in range(6)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "prompts.txt").write_text("\n".join(row["prompt"] for row in rows))
    return folder


def run(*words):
    main([str(word) for word in words])


@pytest.fixture(scope="module")
def trained(home):
    """`sft`, `reward` and `train` on the file; the run's folder."""
    small = ["--model-name", "base.gguf", "--lora-r", "4", "--lora-targets", "all-linear"]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(home)
        run("sft", "--data", "demos.jsonl", *small, "--run-name", "sft", "--epochs", "1")
        more = ["--sft-adapter", "runs/sft"]
        run("reward", "--data", "pairs.jsonl", *small, *more, "--run-name", "reward", "--epochs", "1")
        own = [
            "--rewards",
            "runs/reward",
            "--max-new-tokens",
            "4",
            "--batch-size",
            "2",
            "--learning-rate",
            "0.02",
        ]
        run("doctor", "--data", "prompts.txt", *small, *more, *own)
        step = ["--data", "prompts.txt", *small, *more, *own, "--run-name", "ppo", "--checkpoint-every", "1"]
        run("train", *step, "--epochs", "1")
        run("train", *step, "--epochs", "2", "--resume", "--force")
    return home / "runs" / "ppo"


def test_every_command_works_on_a_gguf_base(trained, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    settings = json.loads((home / "runs" / "sft" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "base.gguf"
    assert len((trained / "metrics.jsonl").read_text().splitlines()) == 6
    run("generate", "--model-name", "base.gguf", "--adapter", "runs/ppo/policy", "--prompt", "what is 3? ")
    assert capsys.readouterr().out
    run("export", "runs/ppo", "merged", "--merge")
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert not hasattr(merged.config, "quantization_config")
    assert AutoTokenizer.from_pretrained("merged")("what is 3?")["input_ids"]
    assert json.loads(Path("merged/config.json").read_text())["dtype"] == "float32"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run("export", "runs/ppo", "f16.gguf", "--gguf", "f16")
        run("export", "runs/ppo", "q8.gguf", "--gguf", "q8_0")
    for form, file in (("f16", "f16.gguf"), ("q8_0", "q8.gguf")):
        state = load(file).state_dict()
        for name, weight in merged.state_dict().items():
            assert ((state[name] - weight).abs() <= storage_error(weight, form)).all()
    base = load("base.gguf").state_dict()
    assert not torch.equal(
        base["model.layers.0.mlp.up_proj.weight"], merged.model.layers[0].mlp.up_proj.weight
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("out", "--gguf", "f16"), "give a file NAME.gguf (got 'out')"),
        (("out.gguf", "--gguf", "f16", "--dtype", "float16"), "no --dtype (got 'float16')"),
        (("base.gguf", "--gguf", "q8_0"), "base.gguf already exists"),
        (("out.gguf", "--gguf", "q4_0"), "q4_0"),
    ],
)
def test_a_wrong_call_is_said_and_writes_nothing(trained, home, monkeypatch, capsys, words, message):
    monkeypatch.chdir(home)
    before = sorted(home.rglob("*"))
    with pytest.raises(SystemExit):
        run("export", "runs/ppo", *words)
    assert message in capsys.readouterr().err
    assert sorted(home.rglob("*")) == before


def test_full_fine_tuning_is_written_too_and_other_architectures_are_named(
    make_config, tiny_folders, tmp_path
):
    for name in ("llama", "gpt2"):
        trainer = PPOTrainer(make_config(model_name=tiny_folders[name], lora_r=0))
        trainer.save(tmp_path / name)
        trainer.config.to_yaml(tmp_path / name / "config.yaml")
    export(tmp_path / "llama", tmp_path / "a.gguf", gguf="f16")
    state = load(tmp_path / "a.gguf").state_dict()
    for name, weight in load(tmp_path / "llama" / "policy").state_dict().items():
        assert ((state[name] - weight).abs() <= storage_error(weight, "f16")).all()
    with pytest.raises(
        ValueError, match="a network of 'gpt2' cannot be written as GGUF, only llama, qwen2, qwen3"
    ):
        export(tmp_path / "gpt2", tmp_path / "b.gguf", gguf="f16")
    assert not (tmp_path / "b.gguf").exists()


def test_an_update_that_the_form_rounds_away_is_a_warning(make_config, tmp_path):
    """Weights of a q8_0 file lie on its grid: a step of a thousandth of a grid's step falls back on it."""
    write_small(tmp_path / "a.gguf", small_network("llama"), gguf.GGMLQuantizationType.Q8_0)
    trainer = PPOTrainer(make_config(model_name=str(tmp_path / "a.gguf"), lora_r=4))
    for name, weight in trainer.models.policy.backbone.network.named_parameters():
        if ".policy." in name and "lora_B" in name:
            weight.data += 1e-6
    trainer.save(tmp_path / "run")
    trainer.config.to_yaml(tmp_path / "run" / "config.yaml")
    with pytest.warns(
        UserWarning, match=r"only \d+% of what was trained is left .* q8_0; merge with --gguf f16"
    ):
        export(tmp_path / "run", tmp_path / "b.gguf", gguf="q8_0")


def test_as_stored_is_what_a_file_gives_back(tmp_path):
    network = small_network("qwen2")
    weight = network.model.layers[0].mlp.up_proj.weight.detach()
    for form in ("f16", "q8_0"):
        write_gguf(network, load_tokenizer("embedded"), tmp_path / f"{form}.gguf", form, "a")
        read = read_gguf(str(tmp_path / f"{form}.gguf")).read("blk.0.ffn_up.weight")
        assert np.array_equal(as_stored(weight, form).numpy(), read)
