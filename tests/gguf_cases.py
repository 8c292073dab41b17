"""Small GGUF files for tests, written without the package's own writer."""

import json

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from proxima.base_setup.tokenizer_setup import load_tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TYPES = gguf.GGMLQuantizationType


def small_network(architecture, seed=0, **settings):
    """Random weights; the embedded model's vocabulary."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "rms_norm_eps": 2.0**-17,
        "initializer_range": 0.1,
        "tie_word_embeddings": architecture == "qwen2",
        "vocab_size": 837,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": 1,
    }
    if architecture == "qwen3":
        sizes["head_dim"] = 32
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **{**sizes, **settings}))
    for name, weight in network.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            weight.data += 0.1 * torch.randn(weight.shape)
    return network.eval()


def gguf_name(name):
    """`blk.1.attn_q.weight` for `model.layers.1.self_attn.q_proj.weight`."""
    stem, _, end = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{end}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{LAYER[part]}.{end}"


def interleaved(values, heads):
    """Rows as the converter of llama.cpp puts them."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        .swapaxes(1, 2)
        .reshape(values.shape)
    )


def random_blocks(shape, kind, generator):
    """Bytes that are blocks of a kind that gguf cannot quantise; scales small and finite."""
    per_block, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // per_block, width), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.002).tobytes(), np.uint8)
    for start in {TYPES.Q4_K: (0, 2), TYPES.Q6_K: (208,)}[kind]:
        blocks[..., start : start + 2] = scale
    return blocks.reshape(*shape[:-1], -1)


def write_small(path, network, kind=TYPES.F32, more=(), leave_out=(), pre="gpt-2", tensors=()):
    """A network and the embedded model's tokenizer as one file.

    Args:
        more: entries of the metadata, in place of others of the same key.
        leave_out: keys and tensors that are not written.
        tensors: more of them, by name.
    """
    config, tokenizer = network.config, load_tokenizer("embedded")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    own = config.model_type
    entries = {
        f"{own}.context_length": config.max_position_embeddings,
        f"{own}.embedding_length": config.hidden_size,
        f"{own}.block_count": config.num_hidden_layers,
        f"{own}.feed_forward_length": config.intermediate_size,
        f"{own}.attention.head_count": config.num_attention_heads,
        f"{own}.attention.head_count_kv": config.num_key_value_heads,
        f"{own}.attention.key_length": size,
        f"{own}.rope.dimension_count": size,
        f"{own}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{own}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(vocabulary) - 2),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
        **dict(more),
    }
    writer = gguf.GGUFWriter(path, own)
    for key, value in entries.items():
        if key in leave_out:
            continue
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add.get(type(value), writer.add_array)(key, value)
    generator = np.random.default_rng(0)
    for name, weight in network.state_dict().items():
        stored, values = gguf_name(name), weight.numpy()
        if stored in leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if own == "llama" and ".attn_q." in stored:
            values = interleaved(values, config.num_attention_heads)
        if own == "llama" and ".attn_k." in stored:
            values = interleaved(values, config.num_key_value_heads)
        if values.ndim == 1:
            writer.add_tensor(stored, np.ascontiguousarray(values))
        elif kind in (TYPES.Q4_K, TYPES.Q6_K):
            writer.add_tensor(stored, random_blocks(values.shape, kind, generator), raw_dtype=kind)
        else:
            writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    for name, values in dict(tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def storage_error(weight, form):
    """How far a stored weight may be from what was given.

    f16 rounds to 11 binary digits. q8_0 holds round(x / d) with d = max|x| / 127 over 32 values of a row; d
    itself is rounded to f16, and multiplied by up to 127.
    """
    if weight.ndim == 1:
        return torch.zeros_like(weight)
    if form == "f16":
        return torch.clamp(weight.abs() * 2.0**-11, min=2.0**-25)
    scale = weight.reshape(-1, 32).abs().amax(1, keepdim=True) / 127
    error = scale * (0.5 + 2.0**-20) + 127 * torch.clamp(scale * 2.0**-11, min=2.0**-25)
    return error.expand(-1, 32).reshape(weight.shape)
