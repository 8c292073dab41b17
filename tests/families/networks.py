"""A tiny network of any architecture. In: a model type. Out: a config of a few thousand weights, and a network from it.

One list of small sizes serves all; `ODD` holds what an architecture needs besides, because its sizes must fit each other.
"""

from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

VOCABULARY, EOS = 260, 256

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS, "decoder_start_token_id": 1,
    "tie_word_embeddings": False, "is_decoder": True,
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "dim_ff": 48,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "word_embed_proj_dim": 32, "embedding_size": 32, "expert_ffn_hidden_size": 16,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "head_dim": 8,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_target_positions": 64, "max_seq_len": 64, "rotary_dim": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2,
    "moe_topk": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8, "v_head_dim": 8,
    "state_size": 4, "ssm_state_size": 4, "mamba_d_state": 4, "time_step_rank": 4, "mamba_dt_rank": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "index_n_heads": 2, "index_head_dim": 8, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "causal": True, "linear_head_dim": 8, "linear_num_heads": 4,
    "image_size": 16, "patch_size": 8, "num_channels": 3,
}  # fmt: skip

PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
ODD: dict[str, dict[str, Any]] = {
    "bamba": MAMBA,
    "granitemoehybrid": MAMBA,
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}


def tiny_config(kind: Any, **changes: Any) -> Any:
    """A config of this class with small sizes, those of its parts too."""
    plain = kind()
    known = set(plain.to_dict()) | set(kind.attribute_map)
    sizes = {name: value for name, value in SMALL.items() if name in known}
    sizes |= _layers(plain) if "layer_types" in known else {}
    if "qk_rope_head_dim" in known:  # keys and queries of two parts, and as many of either
        sizes |= {"head_dim": SMALL["qk_rope_head_dim"], "num_key_value_heads": SMALL["num_attention_heads"]}
    parts = {name: tiny_config(part) for name, part in kind.sub_configs.items() if hasattr(part, "model_type") and part.model_type}
    return kind(**{**sizes, **parts, **ODD.get(kind.model_type, {}), **changes})


def _layers(plain: Any) -> dict[str, Any]:
    """One layer of each kind that the architecture has, at least two."""
    kinds = {name: list(dict.fromkeys(getattr(plain, name, None) or [])) for name in PER_LAYER}
    count = max(2, len(kinds["layer_types"]))
    return {"num_hidden_layers": count} | {name: (found * count)[:count] for name, found in kinds.items() if found}


def causal_configs() -> dict[str, Any]:
    """Config classes of all causal language models of the installed transformers, by model type."""
    return {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}


def tiny_network(model_type: str, **changes: Any) -> Any:
    """Random weights large enough that every part of the network is seen in the logits."""
    config = tiny_config(causal_configs()[model_type], **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config).float().eval()
        for weight in network.parameters():
            if weight.dim() > 1:
                weight.data.normal_(std=0.3)
    return network
