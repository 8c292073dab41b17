"""Networks from GGUF files. In: a file. Out: a config, or a plain network of `transformers` with dequantised
weights.

Only what is computed as the file means it is loaded: metadata or tensors that are not understood are refused
by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from proxima.base_setup.gguf_files import GGUFFile, read_gguf
from proxima.base_setup.nf4_loading import loading_arguments
from proxima.core.json_record import Record

if TYPE_CHECKING:
    from proxima.base_setup.loading import AutoClass

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`general.architecture`, and `model_type` of `transformers`."""
READ = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
"""Numbers that every file must state."""
ALSO_READ = {
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.causal"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length"),
    *("vocab_size", "tensor_data_layout", "pooling_type"),
}
"""Other keys that are understood, or change nothing."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
FREQUENCIES = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all Llama 3.1 and 3.2 models have; a file holds only the factors that follow from it."""


def load_gguf_config(path: str) -> PreTrainedConfig:
    return gguf_config(read_gguf(path))


def load_gguf_network(
    path: str,
    dtype: torch.dtype,
    kind: AutoClass = AutoModelForCausalLM,
    device: torch.device | str = "cpu",
    quantize: bool = False,
    **extra: object,
) -> tuple[PreTrainedModel, set[str]]:
    """A network, and the names of its weights that the file lacks.

    Args:
        kind: an `AutoModelFor...`; a head that the file lacks is untrained.
        quantize: to NF4, on this device; the whole network is in main memory meanwhile.
        extra: settings of the config, such as `num_labels`.
    """
    file = read_gguf(path)
    config = gguf_config(file)
    names = checked_names(file, config)
    config.update(extra)
    with torch.device("meta"):
        shell = kind.from_config(config)
    wanted = set(shell.state_dict())
    state = {
        name: torch.from_numpy(_as_torch(file, stored, config)).to(dtype)
        for name, stored in names.items()
        if name in wanted
    }
    given = loading_arguments(config, None, torch.device(device)) if quantize else {"config": config}
    network, loaded = type(shell).from_pretrained(
        None, state_dict=state, dtype=dtype, output_loading_info=True, **given
    )
    network.name_or_path = network.config.name_or_path = path  # adapters state it as their base
    return network, set(loaded["missing_keys"])


def gguf_config(file: GGUFFile) -> PreTrainedConfig:
    """The config that the metadata and the tensors' shapes mean."""
    architecture = file.stated("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise file.error(
            f"its architecture is {architecture!r}; those that can be read are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unknown(file, architecture)
    values: Record = {name: _number(file, f"{architecture}.{key}") for key, name in READ.items()}
    _check_blocks(file, values["num_hidden_layers"])
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = _number(file, f"{architecture}.attention.head_count_kv", heads)
    size = _number(file, f"{architecture}.attention.key_length", values["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := _number(file, f"{architecture}.{key}", size)) != size:
            raise file.error(f"its {architecture}.{key} ({other}) is not the length of a key ({size})")
    if architecture != "qwen2" or size * heads != values["hidden_size"]:
        values["head_dim"] = size
    if architecture == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        values["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if "token_embd.weight" not in file.tensors:
        raise file.error("it has no tensor 'token_embd.weight'")
    values |= {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "rms_norm_eps": _float(file, f"{architecture}.attention.layer_norm_rms_epsilon", None),
        "rope_parameters": _rope(file, architecture, size),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture]],
        "dtype": _stored_dtype(file),
        "bos_token_id": _token(file, "bos_token_id"),
        "eos_token_id": _ends(file),
        "pad_token_id": _token(file, "padding_token_id"),
    }
    try:
        made = AutoConfig.for_model(architecture, **values)
    except Exception as error:  # the library checks sizes against each other
        raise _misfit(file, error) from None
    made.name_or_path = file.path
    return made


def _misfit(file: GGUFFile, error: Exception) -> ValueError:
    return file.error(f"its sizes do not fit together ({' '.join(str(error).split())})")


def _check_blocks(file: GGUFFile, stated: int) -> None:
    """Stop before anything is made for each of the blocks that a damaged number claims."""
    held = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if held != stated:
        raise file.error(f"its block_count is {stated}, but it holds tensors of {held} blocks")


def _refuse_unknown(file: GGUFFile, architecture: str) -> None:
    """Stop at what would make the network compute something else than the file means."""
    kind, parts = file.stated("general.type", str), file.stated("split.count", int)
    if kind not in (None, "model"):
        raise file.error(f"it holds a {kind!r}, not a model")
    if parts is not None and parts > 1:
        raise file.error(f"it is one of {parts} parts; join them with `llama-gguf-split --merge`")
    if file.stated(f"{architecture}.attention.causal", bool) is False:
        raise file.error("its attention reads both ways; it is not a language model")
    understood = {f"{architecture}.{key}" for key in (*READ, *ALSO_READ)}
    for key, value in file.metadata.items():
        if key.startswith(f"{architecture}.") and key not in understood and np.any(value):
            raise file.error(f"its {key} ({value}) is not understood, so it would be computed wrongly")


def _rope(file: GGUFFile, architecture: str, size: int) -> Record:
    """Base and scaling of the rotary embedding."""
    base = _float(file, f"{architecture}.rope.freq_base", 10000.0)
    scaling = file.stated(f"{architecture}.rope.scaling.type", str) or "none"
    factor = _float(file, f"{architecture}.rope.scaling.factor", 1.0)
    if scaling not in ("none", "linear"):
        raise file.error(
            f"its rope scaling is {scaling!r}; only 'none' and 'linear' are computed as it means"
        )
    if FREQUENCIES in file.tensors:
        return _llama3_rope(file, base, size)
    if scaling == "linear" and factor != 1:
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    return {"rope_type": "default", "rope_theta": base}


def _llama3_rope(file: GGUFFile, base: float, size: int) -> Record:
    """Find the settings whose factors these are."""
    stored = file.read(FREQUENCIES).reshape(-1)
    settings = {"rope_type": "llama3", "rope_theta": base, "factor": float(stored.max()), **LLAMA3_ROPE}
    if len(stored) != size // 2 or not np.allclose(stored, llama3_factors(settings, size), rtol=1e-4):
        raise file.error(f"its {FREQUENCIES} are not those of Llama 3, so they would be computed wrongly")
    return settings


def llama3_factors(rope: Record, size: int) -> np.ndarray:
    """By how much Llama 3's scaling slows each frequency of the rotary embedding: (size / 2,)."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def checked_names(file: GGUFFile, config: PreTrainedConfig) -> dict[str, str]:
    """The tensor behind each weight of the network, by the weight's name; shapes agree and none is left."""
    try:
        with torch.device("meta"):
            shapes = {
                name: tuple(weight.shape)
                for name, weight in AutoModelForCausalLM.from_config(config).state_dict().items()
            }
    except Exception as error:  # sizes that cannot be
        raise _misfit(file, error) from None
    names = stored_names(config, shapes)
    if config.tie_word_embeddings:
        del names["lm_head.weight"]
    if odd := sorted(file.tensors.keys() - {*names.values(), FREQUENCIES}):
        raise file.error(f"its tensor {odd[0]!r} has no place in a network of {config.model_type}")
    for name, stored in names.items():
        if stored not in file.tensors:
            raise file.error(f"it has no tensor {stored!r}")
        if (shape := file.tensors[stored].shape) != shapes[name]:
            raise file.error(f"its tensor {stored!r} has shape {shape}, where {shapes[name]} is needed")
    return names


def stored_names(config: PreTrainedConfig, weights: Iterable[str]) -> dict[str, str]:
    """Names of GGUF by those of `transformers`."""
    import gguf

    kind = next(item for item, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    return {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in weights}


def rotated_heads(config: PreTrainedConfig, stored: str) -> int:
    """How many heads of this tensor Llama's files keep in another order of rows; 0 = it is as it is."""
    if config.model_type != "llama":
        return 0
    part = stored.split(".")[2] if stored.startswith("blk.") else ""
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part, 0)


def _as_torch(file: GGUFFile, stored: str, config: PreTrainedConfig) -> np.ndarray:
    """A tensor's values in `transformers`' order: the halves of a head behind each other, not in turns."""
    values = file.read(stored)
    if heads := rotated_heads(config, stored):
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
    return values


def _number(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = default if key not in file.metadata else file.stated(key, int)
    if value is None or value < 1:
        raise file.error(f"its {key} must be a positive integer, got {value!r}")
    return value


def _float(file: GGUFFile, key: str, default: float | None) -> float:
    value = default if key not in file.metadata else file.stated(key, float)
    if value is None or not 0 < value < np.inf:
        raise file.error(f"its {key} must be a positive number, got {value!r}")
    return value


def _token(file: GGUFFile, name: str) -> int | None:
    """A special token's id, where the file states one that exists."""
    value = file.stated(f"tokenizer.ggml.{name}", int)
    exists = value is not None and 0 <= value < file.tensors["token_embd.weight"].shape[0]
    return value if exists else None


def _ends(file: GGUFFile) -> int | list[int] | None:
    """Every token that ends a response."""
    found = {end for name in ENDS if (end := _token(file, name)) is not None}
    return sorted(found) if len(found) > 1 else next(iter(found), None)


def _stored_dtype(file: GGUFFile) -> torch.dtype:
    """The type that the matrices were written in; float32 where they are quantised."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({1}): torch.float16, frozenset({30}): torch.bfloat16}.get(
        frozenset(kinds), torch.float32
    )
