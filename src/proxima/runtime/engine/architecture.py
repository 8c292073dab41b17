"""Which networks the decoder supports, and each network's parts under common names.

`families.py` declares where they are.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from proxima.core.context_length import rotary_parameters
from proxima.core.linear4bit import Linear4bit, is_quantized
from proxima.runtime.engine.attention_rules import AttentionRule
from proxima.runtime.engine.experts import FUSED, ExpertProjection, Experts, can_group
from proxima.runtime.engine.families import FAMILIES, Config, Family
from proxima.runtime.engine.layer_functions import ACTIVATIONS, NO_NORM, DecoderShape, Norm
from proxima.runtime.engine.quantized_weights import can_join

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROTARY = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
"""Kinds of rotary positions whose angles depend on a token's own position alone; of the last two this holds
within `context_length`."""
DecoderLayer: TypeAlias = Any
"""A layer, or a module in it; their attributes depend on the architecture."""
LinearModule: TypeAlias = "nn.Linear | Conv1D | LoraLayer"
"""A projection of a layer, with or without adapters."""
Angles: TypeAlias = "tuple[Tensor | None, Tensor | None]"
"""Cosines and sines (N, D) of rotary positions; None for a layer without."""


def supports(network: PreTrainedModel) -> bool:
    """Whether the decoder computes this architecture, with its settings and adapters, as `transformers`
    does."""
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in network.modules()):
        return False
    if not knows(network) or isinstance(network.get_output_embeddings(), LoraLayer):
        return False
    adapted = [module for module in network.modules() if isinstance(module, LoraLayer)]
    mixtures = _mixtures(network)
    if any(_is_special(layer, mixtures) for layer in adapted):
        return False
    return not is_quantized(network) or _can_join(Architecture(network))


def _can_join(architecture: Architecture) -> bool:
    """Whether each projection's modules are quantised alike, or none of them is."""
    for layer in architecture.layers:
        for group in architecture.members(layer):
            bases = [part.get_base_layer() if isinstance(part, LoraLayer) else part for part in group]
            weights = [base.nf4 for base in bases if isinstance(base, Linear4bit)]
            if weights and not (len(weights) == len(bases) and can_join(weights)):
                return False
    return True


def knows(network: PreTrainedModel) -> bool:
    """Whether the decoder computes this architecture with its settings; adapters aside."""
    config = network.config.get_text_config()
    if config is not network.config:  # the language model is part of a larger network
        return False
    if not type(network).__module__.startswith("transformers."):  # code of a model's own, under a known name
        return False
    family = FAMILIES.get(config.model_type)
    if family is None or not family.usual(config):
        return False
    return (
        _field(config, family.activation_field) in ACTIVATIONS
        and all(rope.get("rope_type", "default") in ROTARY for rope in rotary_parameters(config))
        and _has_known_layers(config, family)
    )


def _has_known_layers(config: Config, family: Family) -> bool:
    """Whether each layer's attention is causal, or causal with a sliding window."""
    kinds = set(_layer_types(config, family))
    if kinds - {"full_attention", "sliding_attention"}:
        return False
    return "sliding_attention" not in kinds or (config.sliding_window or 0) >= 1


def _layer_types(config: Config, family: Family) -> list[str]:
    """The kind of attention of each layer."""
    count = config.num_hidden_layers
    if family.window_everywhere:
        return ["full_attention" if config.sliding_window is None else "sliding_attention"] * count
    return list(getattr(config, "layer_types", None) or ["full_attention"] * count)


def _field(config: Config, name: str | None, otherwise: float | None = None) -> Any:
    """The value of a field of the config, where it is named and the config has it."""
    return otherwise if name is None else getattr(config, name, otherwise)


def _mixtures(network: PreTrainedModel) -> set[nn.Module]:
    """The routers and experts of a mixture of experts."""
    family = FAMILIES[network.config.model_type]
    if family.experts is None:
        return set()
    found = {
        attrgetter(path)(layer)
        for layer in attrgetter(family.layers)(network.base_model)
        for path in (family.experts, *family.up)
    }
    return {module.get_base_layer() if isinstance(module, LoraLayer) else module for module in found}


def _is_special(layer: LoraLayer, mixtures: set[nn.Module]) -> bool:
    """An adapter that is not plain LoRA (down, up and scale), or on anything but linear layers, routers and
    experts."""
    base = layer.get_base_layer()
    return bool(
        any(getattr(layer, "use_dora", {}).values())
        or any(getattr(layer, "lora_bias", {}).values())
        or len(layer.lora_embedding_A)
        or not (isinstance(base, (nn.Linear, Conv1D)) or base in mixtures)
    )


class Architecture:
    """A network's parts under common names; all of them are the network's own live modules."""

    def __init__(self, network: PreTrainedModel):
        self.network = network
        self.inner = network.base_model
        self.config: Config = network.config.get_text_config()
        self.family = FAMILIES[self.config.model_type]
        self.layers = attrgetter(self.family.layers)(self.inner)
        self.rotary_kinds = self._rotary_kinds()

    @property
    def shape(self) -> DecoderShape:
        config, family = self.config, self.family
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return DecoderShape(
            heads=config.num_attention_heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_size=size,
            eps=_field(config, family.eps_field),
            scale=family.attention_scale(config, size),
            activation=_field(config, family.activation_field),
            norm_offset=family.norm_offset,
            residual_factor=_field(config, family.residual_factor_field, 1.0),
        )

    @property
    def rules(self) -> list[AttentionRule]:
        """The sliding window and soft cap of each layer's attention."""
        kinds = _layer_types(self.config, self.family)
        windows = [self.config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        cap = _field(self.config, self.family.attention_cap_field)
        if self.config._attn_implementation == "sdpa":  # it has no soft cap
            cap = None
        return [AttentionRule(window, cap) for window in windows]

    @property
    def suits_kernels(self) -> bool:
        """Whether its norms, heads, attention, MLP and logits are those that the Triton kernels compute."""
        shape, first = self.shape, self.layers[0]
        norms, head_norms = self.norms(first), self.head_norms(first)
        turned = [rope.get("partial_rotary_factor") or 1.0 for rope in rotary_parameters(self.config)]
        return all(
            (
                self.plain_head and self.family.gated and self.family.experts is None,
                self.embedding_table is not None,
                shape.activation == "silu" and shape.residual_factor == 1,
                [norm is NO_NORM for norm in norms] == [False, True, False, True],
                norms[0].bias is None and norms[0].offset is None,
                all(norm is None or len(norm) == shape.head_size for norm in head_norms),
                set(self.rotary_kinds) == {""} and turned == [1.0],
                not any(map(any, self.rules)),
            )
        )

    @property
    def plain_head(self) -> bool:
        """Whether logits are what the output embeddings give."""
        return not self.family.logit_cap_field and not self.family.logit_divisor_field

    def members(self, layer: DecoderLayer) -> tuple[list[LinearModule], ...]:
        """The modules of each projection, in the order of `layer_weights.Loras`."""
        family = self.family
        groups = (family.qkv, (family.out,), family.up, (family.down,) if family.experts is None else ())
        return tuple([attrgetter(path)(layer) for path in group] for group in groups)

    def experts(self, layer: DecoderLayer) -> Experts | None:
        """The weights of a mixture of experts; None where the layer has one MLP."""
        if self.family.experts is None:
            return None
        module, adapted = attrgetter(self.family.experts)(layer), {}
        while isinstance(module, ParamWrapper):  # one for each of the weights that have adapters
            adapted[module.parameter_name], module = module, module.base_layer
        up, down = (ExpertProjection(getattr(module, name), adapted.get(name)) for name in FUSED)
        config, grouped = self.config, can_group(up.weight, down.weight)
        return Experts(up, down, config.num_experts_per_tok, config.norm_topk_prob, grouped)

    def norms(self, layer: DecoderLayer) -> tuple[Norm, Norm, Norm, Norm]:
        """The norms before and after attention, before and after the MLP."""
        family = self.family
        paths = (family.norm, family.after_attention, family.mlp_norm, family.after_mlp)
        one, two, three, four = (
            NO_NORM if path is None else self._norm(attrgetter(path)(layer)) for path in paths
        )
        return one, two, three, four

    def head_norms(self, layer: DecoderLayer) -> list[Tensor | None]:
        """The weights of the norms of queries and keys, if there are any."""
        modules = dict(layer.named_modules())
        found = [modules.get(path) for path in self.family.head_norms]
        return [None if norm is None else norm.weight for norm in found]

    @property
    def last_norm(self) -> Norm:
        return self._norm(attrgetter(self.family.last_norm)(self.inner))

    def _norm(self, module: DecoderLayer) -> Norm:
        return Norm(module.weight, getattr(module, "bias", None), self.family.norm_offset)

    def embed(self, flat: Tensor, positions: Tensor) -> tuple[Tensor, list[Angles]]:
        """Token embeddings (N, hidden), and the rotary angles of each layer."""
        x = self.network.get_input_embeddings()(flat)
        if (factor := _field(self.config, self.family.embedding_factor_field)) is not None:
            x = x * factor
        if self.family.learned_positions is not None:
            x = x + attrgetter(self.family.learned_positions)(self.inner)(positions)
        known = {kind: self.angles(kind, x, positions) for kind in set(self.rotary_kinds)}
        return x, [known[kind] for kind in self.rotary_kinds]

    @property
    def embedding_table(self) -> Tensor | None:
        """The matrix whose rows are what `embed` gives; None where it does more than look them up."""
        module = self.network.get_input_embeddings()
        factor = _field(self.config, self.family.embedding_factor_field)
        plain = type(module) is nn.Embedding and factor is None and self.family.learned_positions is None
        return module.weight if plain else None

    def _rotary_kinds(self) -> list[str | None]:
        """For each layer which angles it has: None, the network's only ones (""), or those of its type."""
        kinds: list[str | None] = [""] * len(self.layers)
        if self.family.learned_positions is not None:
            return [None] * len(self.layers)
        if "layer_type" in inspect.signature(self.inner.rotary_emb.forward).parameters:
            kinds = [*_layer_types(self.config, self.family)]
        rotates = _field(self.config, self.family.rotates_field) or [True] * len(kinds)
        return [kind if rotated else None for kind, rotated in zip(kinds, rotates, strict=True)]

    def angles(self, kind: str | None, x: Tensor, positions: Tensor) -> Angles:
        """The rotary angles of a kind of layer, in the dtype and on the device of x."""
        if kind is None:
            return None, None
        module = self.inner.rotary_emb
        forward = inspect.unwrap(type(module).forward)  # without the check of whether a sequence is longer
        cos, sin = forward(module, x, positions.unsqueeze(0), *([kind] if kind else []))
        return cos[0], sin[0]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V)."""
        return network_logits(self.network, hidden)


def network_logits(network: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits (M, V) of a network that the decoder knows, whose output embeddings have no adapter."""
    config: Config = network.config.get_text_config()
    family = FAMILIES[config.model_type]
    logits = network.get_output_embeddings()(hidden)
    if (divisor := _field(config, family.logit_divisor_field)) is not None:
        logits = logits / divisor
    if (cap := _field(config, family.logit_cap_field)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits
