"""A tiny network of any architecture. In: a model type. Out: a config of a few thousand weights, and a
network from it.

One list of small sizes serves all; `ODD` holds what an architecture needs besides, because its sizes must fit
each other.
"""

import copy
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

VOCABULARY, EOS, BOS, PAD = 260, 256, 257, 258

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS,
    "tie_word_embeddings": False, "is_decoder": True,
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "dim_ff": 48,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "word_embed_proj_dim": 32, "embedding_size": 32, "expert_ffn_hidden_size": 16,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "head_dim": 8,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_target_positions": 512, "max_seq_len": 512,
    "rotary_dim": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2,
    "moe_topk": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8, "v_head_dim": 8,
    "state_size": 4, "ssm_state_size": 4, "mamba_d_state": 4, "time_step_rank": 4, "mamba_dt_rank": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "index_n_heads": 2, "index_head_dim": 8, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "causal": True, "linear_head_dim": 8, "linear_num_heads": 4,
    "dff": 48, "d_inner": 48, "shared_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "global_head_dim": 8,
    "num_global_key_value_heads": 2, "zero_expert_num": 1, "mlp_dim": 48, "output_channels": 8, "num_blocks": 2,
    "output_embedding_size": 32, "input_embedding_size": 32, "o_lora_rank": 8, "shared_expert_ffn_size": 16,
    "image_size": 16, "patch_size": 8, "num_channels": 3,
}  # fmt: skip

PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
ASSISTED = {
    "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "vocab_size": VOCABULARY,
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
AUDIO = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
NEEDED = {
    "musicgen": {**AUDIO, "decoder": {"model_type": "musicgen_decoder"}},
    "musicgen_melody": {**AUDIO, "decoder": {"model_type": "musicgen_melody_decoder"}},
}
"""What a config cannot be made without."""
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ODD: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 16},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "blt_global_transformer": {"hidden_size": 64, "head_dim": 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**ROPE, "mrope_section": [2, 1, 1]}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48}},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5, "key_multiplier": 0.5},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
    "gemma4_assistant": {"text_config": ASSISTED},
    "gemma4_unified_assistant": {"text_config": {**ASSISTED, "model_type": "gemma4_unified_text"}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "hyperclovax": {"logits_scaling": 0.5},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 32,
                       "indexer_compress_ratio": 4},
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds": False, "attention_head_size": 8, "feed_forward_size": 48,
                 "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8},
    "roc_bert": {"shape_vocab_size": 300, "pronunciation_vocab_size": 300},
    "xlstm": {"num_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2, "n_mamba_heads": 8,
               "mamba_ngroups": 1},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(kind: Any, **changes: Any) -> Any:
    """A config of this class with small sizes, those of its parts too."""
    plain = kind(**copy.deepcopy(NEEDED.get(kind.model_type, {})))
    known = set(plain.to_dict()) | set(kind.attribute_map)
    sizes = {name: value for name, value in SMALL.items() if name in known}
    sizes |= _layers(plain) if "layer_types" in plain.to_dict() else {}
    if "qk_rope_head_dim" in known:  # keys and queries of two parts, and as many of either
        sizes |= {"head_dim": SMALL["qk_rope_head_dim"], "num_key_value_heads": SMALL["num_attention_heads"]}
    parts = {
        name: tiny_config(type(part))
        for name in kind.sub_configs
        if (part := getattr(plain, name, None)) is not None
    }
    return kind(**{**sizes, **parts, **copy.deepcopy(ODD.get(kind.model_type, {})), **changes})


def _layers(plain: Any) -> dict[str, Any]:
    """One layer of each kind that the architecture has, at least two."""
    kinds = {name: list(dict.fromkeys(getattr(plain, name, None) or [])) for name in PER_LAYER}
    count = max(2, len(kinds["layer_types"]))
    return {"num_hidden_layers": count} | {
        name: (found * count)[:count] for name, found in kinds.items() if found
    }


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
                weight.data.normal_(std=min(0.3, 1.7 * weight.shape[-1] ** -0.5))
    return network
