"""Which networks the decoder supports, and where each keeps its layers and modules.

Two families: GPT-2, and those built like Llama.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from peft.tuners.lora import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from proxima.runtime.engine.layer_functions import ACTIVATIONS, DecoderShape, Norm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LLAMA_LIKE = ("llama", "qwen2", "qwen3", "mistral")

DecoderLayer: TypeAlias = Any
"""A layer, or a module in it; their attributes depend on the architecture."""
LinearModule: TypeAlias = "nn.Linear | Conv1D | LoraLayer"
"""A projection of a layer, with or without adapters."""


def supports(network: PreTrainedModel) -> bool:
    """Whether the decoder computes this architecture, with its settings and adapters, as `transformers`
    does."""
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in network.modules()):
        return False
    layers = [module for module in network.modules() if isinstance(module, LoraLayer)]
    adapted_head = isinstance(network.get_output_embeddings(), LoraLayer)
    return knows(network) and not adapted_head and not any(_is_special(layer) for layer in layers)


def knows(network: PreTrainedModel) -> bool:
    """Whether the decoder computes this architecture with its settings; adapters aside."""
    config = network.config.get_text_config()
    if config is not network.config:  # the language model is part of a larger network
        return False
    if config.model_type == "gpt2":
        usual = not config.scale_attn_by_inverse_layer_idx and not config.add_cross_attention
        usual = usual and config.activation_function in ACTIVATIONS
    elif config.model_type in LLAMA_LIKE:
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        windows = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        windows = windows and not (config.model_type == "mistral" and config.sliding_window)
        usual = rope in ("default", "linear", "llama3", "yarn") and windows and config.hidden_act == "silu"
    else:
        return False
    return usual


def _is_special(layer: LoraLayer) -> bool:
    """An adapter that is not plain LoRA (down, up and scale), or not on a linear layer."""
    return bool(
        any(getattr(layer, "use_dora", {}).values())
        or any(getattr(layer, "lora_bias", {}).values())
        or len(layer.lora_embedding_A)
        or not isinstance(layer.get_base_layer(), (nn.Linear, Conv1D))
    )


class Architecture:
    """A network's parts under common names; all of them are the network's own live modules."""

    def __init__(self, network: PreTrainedModel):
        self.network = network
        self.inner = network.base_model
        self.config = network.config.get_text_config()
        self.is_gpt2 = self.config.model_type == "gpt2"
        self.layers = self.inner.h if self.is_gpt2 else self.inner.layers

    @property
    def shape(self) -> DecoderShape:
        config = self.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return DecoderShape(
            heads=config.num_attention_heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_size=size,
            eps=config.layer_norm_epsilon if self.is_gpt2 else config.rms_norm_eps,
            scale=1.0 if self.is_gpt2 and not config.scale_attn_weights else size**-0.5,
            activation=config.activation_function if self.is_gpt2 else "",
        )

    def members(self, layer: DecoderLayer) -> tuple[list[LinearModule], ...]:
        """The modules of each projection, in the order of `layer_weights.Loras`."""
        if self.is_gpt2:
            return [layer.attn.c_attn], [layer.attn.c_proj], [layer.mlp.c_fc], [layer.mlp.c_proj]
        attention = layer.self_attn
        mlp = layer.mlp
        return (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        )

    def norms(self, layer: DecoderLayer) -> tuple[Norm, Norm]:
        """The norms before attention and before the MLP."""
        if self.is_gpt2:
            return _norm(layer.ln_1), _norm(layer.ln_2)
        return _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)

    def head_norms(self, layer: DecoderLayer) -> list[Tensor | None]:
        """The weights of the norms of queries and keys, where there are any."""
        attention = layer.attn if self.is_gpt2 else layer.self_attn
        found = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        return [None if norm is None else norm.weight for norm in found]

    @property
    def last_norm(self) -> Norm:
        return _norm(self.inner.ln_f if self.is_gpt2 else self.inner.norm)

    def embed(self, flat: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Token embeddings (N, hidden), and rotary angles where the architecture has them."""
        x = self.network.get_input_embeddings()(flat)
        if self.is_gpt2:
            return x + self.inner.wpe(positions), None, None
        cos, sin = self.inner.rotary_emb(x, positions.unsqueeze(0))
        return x, cos[0], sin[0]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V)."""
        return self.network.get_output_embeddings()(hidden)


def _norm(module: DecoderLayer) -> Norm:
    return Norm(module.weight, getattr(module, "bias", None))
