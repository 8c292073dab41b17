"""`proxima export --gguf`: files that llama.cpp and the tools around it load.

In: a network and its tokenizer. Out: one file, with f16 or q8_0 matrices; vectors stay in float32.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from proxima.base_setup import (
    ARCHITECTURES,
    CONTROL,
    CUTS,
    FREQUENCIES,
    NORMAL,
    PROBES,
    UNUSED,
    USER_DEFINED,
    Metadata,
    build_tokenizer,
    checked_names,
    eos_token_ids,
    gguf_config,
    llama3_factors,
    read_gguf,
    rotated_heads,
    stored_names,
)

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

FILE_TYPES = {"f16": 1, "q8_0": 7}
"""`general.file_type` of the two forms."""
LARGEST = float(np.finfo(np.float16).max)
IDLE = {
    *("architectures", "dtype", "transformers_version", "_name_or_path", "initializer_range", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "pretraining_tp"),
    *("tie_word_embeddings", "max_window_layers", "sliding_window", "head_dim"),
}
"""Settings of a network that change nothing it computes, or that the tensors' shapes hold."""


def write_gguf(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, to: Path, form: str, name: str
) -> None:
    """Write the whole file beside `to` and rename it, so that `to` is whole or not there."""
    check_architecture(network.config.model_type)
    tokens = tokenizer_entries(tokenizer, network)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as folder:
        part = Path(folder) / "part.gguf"
        _write_file(network, tokens, part, form, name)
        _check_written(network, part)
        part.replace(to)


def check_architecture(name: str) -> None:
    if name not in ARCHITECTURES:
        raise ValueError(
            f"a network of {name!r} cannot be written as GGUF, only {', '.join(ARCHITECTURES)}; export it "
            "without --gguf"
        )


def _write_file(network: PreTrainedModel, tokens: Metadata, path: Path, form: str, name: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, network.config.model_type)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[form])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_sizes(writer, network.config)
    _add_tokens(writer, tokens)
    config, weights = network.config, network.state_dict()
    for key, stored in stored_names(config, weights).items():
        if stored == "output.weight" and torch.equal(weights[key], network.get_input_embeddings().weight):
            continue  # tied
        values = _in_gguf_order(weights[key].detach().float().cpu().numpy(), rotated_heads(config, stored))
        if values.ndim == 1:
            writer.add_tensor(stored, values)
        else:
            kind = matrix_kind(values, form, stored)
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor(FREQUENCIES, llama3_factors(config.rope_parameters, _head_size(config)))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def matrix_kind(values: np.ndarray, form: str, name: str = "") -> GGMLQuantizationType:
    """How a matrix is stored: q8_0 where its rows are made of whole blocks."""
    import gguf

    if not np.abs(values).max() <= LARGEST:
        raise ValueError(f"the weights {name!r} do not fit {form}: they hold {np.abs(values).max()}")
    kind = gguf.GGMLQuantizationType[form.upper()]
    whole = values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return kind if whole else gguf.GGMLQuantizationType.F16


def as_stored(weight: torch.Tensor, form: str) -> torch.Tensor:
    """A matrix as it is read again from a file of this form."""
    import gguf

    values = weight.float().cpu().numpy()
    kind = matrix_kind(values, form)
    return torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind)).reshape(weight.shape)


def _in_gguf_order(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Llama's query and key heads in turns of both halves; what reading undoes."""
    if not heads:
        return values
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _head_size(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_sizes(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    size, rope = _head_size(config), config.rope_parameters
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise ValueError(
            f"rope scaling {rope['rope_type']!r} cannot be written as GGUF; export without --gguf"
        )
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if rope["rope_type"] == "linear":
        writer.add_string(f"{config.model_type}.rope.scaling.type", "linear")
        writer.add_float32(f"{config.model_type}.rope.scaling.factor", rope["factor"])


def _add_tokens(writer: GGUFWriter, entries: Metadata) -> None:
    for key, value in entries.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def tokenizer_entries(tokenizer: PreTrainedTokenizerFast, network: PreTrainedModel) -> Metadata:
    """The metadata `tokenizer.*`, with the name of the cuts under which it gives the same ids."""
    rows = network.get_input_embeddings().num_embeddings
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if backend["model"]["type"] != "BPE" or '"ByteLevel"' not in json.dumps(backend["pre_tokenizer"]):
        raise ValueError("only a byte-level BPE tokenizer can be written as GGUF; export without --gguf")
    added = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in backend["added_tokens"]}
    known = {number: token for token, number in tokenizer.get_vocab().items() if number < rows}
    names = [known.get(number, f"[PAD{number}]") for number in range(rows)]
    kinds = [
        UNUSED if re.fullmatch(rf"\[PAD{number}\]", token) else added.get(number, NORMAL)
        for number, token in enumerate(names)
    ]
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "padding": tokenizer.pad_token_id,
        "unknown": tokenizer.unk_token_id,
    }
    others = [end for end in eos_token_ids(tokenizer, network) if end != tokenizer.eos_token_id]
    ids |= dict(zip(("eot", "eom"), others, strict=False))
    merges = backend["model"]["merges"]
    entries: Metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.add_bos_token": _adds_bos(tokenizer),
    }
    for role, number in ids.items():
        if number is not None and number < rows:
            entries[f"tokenizer.ggml.{role}_token_id"] = number
    if isinstance(tokenizer.chat_template, str):
        entries["tokenizer.chat_template"] = tokenizer.chat_template
    return entries | {"tokenizer.ggml.pre": _find_cuts(tokenizer, entries)}


def _adds_bos(tokenizer: PreTrainedTokenizerFast) -> bool:
    with_it, without = tokenizer("x")["input_ids"], tokenizer("x", add_special_tokens=False)["input_ids"]
    return with_it == [tokenizer.bos_token_id, *without]


def _find_cuts(tokenizer: PreTrainedTokenizerFast, entries: Metadata) -> str:
    """The first name of cuts that gives this tokenizer's ids on texts that tell them apart."""
    kinds = zip(entries["tokenizer.ggml.tokens"], entries["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind in (CONTROL, USER_DEFINED)][:8]
    texts = [*PROBES, "1234567 a1b22  \n\n x\t", *(f"a {token} b{token}12" for token in special)]
    expected = [tokenizer(text)["input_ids"] for text in texts]
    for name in CUTS:
        made = build_tokenizer(entries, name)
        if [made(text)["input_ids"] for text in texts] == expected:
            return name
    raise ValueError("the tokenizer cuts texts as no GGUF file can say it here; export without --gguf")


def _check_written(network: PreTrainedModel, path: Path) -> None:
    """The file means the network that was written: a setting that GGUF has no key for is named."""
    file = read_gguf(str(path))
    config = gguf_config(file)
    checked_names(file, config)
    mine = network.config.to_dict()
    for name, value in config.to_dict().items():
        if name not in IDLE and not _equal(mine.get(name), value):
            raise ValueError(
                f"a network with {name} = {mine.get(name)!r} cannot be written as GGUF (there it would be "
                f"{value!r}); export without --gguf"
            )


def _equal(left: object, right: object) -> bool:
    """Equal as far as a file's float32 can hold it."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return bool(np.float32(left) == np.float32(right))
    return bool(left == right)
