"""`FAMILIES`: the architectures that the decoder computes, one declaration each.

A `Family` says where a network keeps its parts and in what its layers differ from Llama's. Fields that end in
`_field` name a field of the network's config. docs/contributing.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Config: TypeAlias = Any
"""A network's config; its fields depend on the architecture."""


@dataclass(frozen=True)
class Family:
    """Paths of modules are relative to a layer, or to the network without its head (`layers`, `last_norm`,
    `learned_positions`). The defaults are Llama's."""

    layers: str = "layers"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three modules, or one whose outputs are queries, keys and values in this order."""
    out: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up, or one module whose outputs are both in this order, or the up projection alone."""
    down: str = "mlp.down_proj"
    gated: bool = True
    """activation(gate) * up; otherwise activation(up)."""
    experts: str | None = None
    """Module with the weights of a mixture's experts; `up` is its router then, and `down` is not read."""

    norm: str | None = "input_layernorm"
    """Of what attention reads; None = it reads the residual stream itself."""
    after_attention: str | None = None
    """Of what attention adds to the residual stream."""
    mlp_norm: str | None = "post_attention_layernorm"
    """Of what the MLP reads."""
    after_mlp: str | None = None
    """Of what the MLP adds."""
    head_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    """Of queries and keys, where a layer has them: of each head, or of all heads together, by their size."""
    last_norm: str = "norm"
    norm_offset: float | None = None
    """Added to the weights of RMS norms, which are multiplied in float32; None = no offset, and multiplied in
    the dtype of the network."""

    learned_positions: str | None = None
    """Embedding of positions that is added to the tokens'; None = rotary positions."""
    rotates_field: str | None = None
    """For each layer whether it has rotary positions; None = all have them."""
    window_everywhere: bool = False
    """All layers have the config's `sliding_window`; otherwise those that `layer_types` names have it."""
    attention_cap_field: str | None = None
    """Soft cap c of attention scores: c * tanh(score / c)."""
    logit_cap_field: str | None = None
    """Soft cap of logits."""
    embedding_factor_field: str | None = None
    residual_factor_field: str | None = None
    """Factor of what attention and MLP add to the residual stream."""
    logit_divisor_field: str | None = None
    attention_scale: Callable[[Config, int], float] = lambda config, size: size**-0.5
    """The factor of attention scores, from the config and the head size."""

    eps_field: str = "rms_norm_eps"
    activation_field: str = "hidden_act"
    usual: Callable[[Config], bool] = lambda config: True
    """Whether the config asks for nothing that this declaration leaves out."""


LLAMA = Family()
GPT2 = Family(
    layers="h",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    gated=False,
    norm="ln_1",
    mlp_norm="ln_2",
    last_norm="ln_f",
    learned_positions="wpe",
    attention_scale=lambda config, size: size**-0.5 if config.scale_attn_weights else 1.0,
    eps_field="layer_norm_epsilon",
    activation_field="activation_function",
    usual=lambda config: not config.scale_attn_by_inverse_layer_idx and not config.add_cross_attention,
)
MISTRAL = replace(LLAMA, window_everywhere=True)
PHI3 = replace(MISTRAL, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
OLMOE = replace(LLAMA, up=("mlp.gate",), experts="mlp.experts", usual=lambda config: config.clip_qkv is None)
QWEN3_MOE = replace(
    OLMOE,
    window_everywhere=True,
    usual=lambda config: (
        config.num_experts > 0 and config.decoder_sparse_step == 1 and not config.mlp_only_layers
    ),
)
SMOLLM3 = replace(LLAMA, rotates_field="no_rope_layers")
OLMO2 = replace(
    LLAMA,
    norm=None,
    after_attention="post_attention_layernorm",
    mlp_norm=None,
    after_mlp="post_feedforward_layernorm",
    norm_offset=0.0,
)
GRANITE = replace(
    LLAMA,
    embedding_factor_field="embedding_multiplier",
    residual_factor_field="residual_multiplier",
    logit_divisor_field="logits_scaling",
    attention_scale=lambda config, size: config.attention_multiplier,
)
GEMMA = replace(
    LLAMA,
    norm_offset=1.0,
    usual=lambda config: not getattr(config, "use_bidirectional_attention", None),
)
GEMMA3 = replace(
    GEMMA,
    after_attention="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    logit_cap_field="final_logit_softcapping",
    attention_scale=lambda config, size: config.query_pre_attn_scalar**-0.5,
    activation_field="hidden_activation",
)
GEMMA2 = replace(GEMMA3, attention_cap_field="attn_logit_softcapping")

FAMILIES: dict[str, Family] = {
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt2": GPT2,
    "granite": GRANITE,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "olmoe": OLMOE,
    "phi3": PHI3,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "qwen3_moe": QWEN3_MOE,
    "smollm3": SMOLLM3,
}
"""By `model_type` of the config."""
