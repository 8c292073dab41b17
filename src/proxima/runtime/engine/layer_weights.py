"""A layer's weights as the products read them: `Block`, and the `Loras` of an adapter on it.

Weights that multiply the same input are fused into one tensor. The model's own parameters become views of it,
so there is no second copy. Weights that are themselves trained stay where they are. Quantised ones are joined
as codes; products read them from a scratch that all layers share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from proxima.core.linear4bit import Linear4bit
from proxima.runtime.engine.architecture import Architecture, DecoderLayer, LinearModule
from proxima.runtime.engine.experts import Experts
from proxima.runtime.engine.layer_functions import Norm
from proxima.runtime.engine.lora_products import NO_PROJECTION, Lora, Projection
from proxima.runtime.engine.quantized_weights import QuantizedWeight, Scratch, join

PADDING_STEP = 8  # inner sizes are multiples of this: fast products need the alignment


class Block(NamedTuple):
    """The weights of one layer."""

    norm: Norm
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Projection
    after_attention: Norm
    mlp_norm: Norm
    up: Projection  # gate and up, or the one up projection, or a mixture's router
    down: Projection
    after_mlp: Norm
    experts: Experts | None = None  # `down` is empty then

    @property
    def projections(self) -> tuple[Projection, ...]:
        """In the order of `Loras`."""
        return self.qkv, self.out, self.up, self.down


class Loras(NamedTuple):
    """An adapter on one layer."""

    qkv: Lora | None = None
    out: Lora | None = None
    up: Lora | None = None
    down: Lora | None = None

    def with_dropout(self, rate: float) -> Loras:
        return Loras(*(lora and lora._replace(dropout=rate) for lora in self))


def kinds_of(blocks: Sequence[Block], place: int) -> list[Projection]:
    """The first of the layers' projections in a place of `Block.projections` that is quantised, and the first
    that is not: kernels differ by that."""
    kinds: dict[bool, Projection] = {}
    for block in blocks:
        one = block.projections[place]
        kinds.setdefault(one.quantized is None, one)
    return list(kinds.values())


def trains_base_weights(architecture: Architecture) -> bool:
    """Whether the layers' own weights are trained, rather than adapters on them."""
    members = [module for group in architecture.members(architecture.layers[0]) for module in group]
    return any(_base(module).weight.requires_grad for module in members)


def read_block(architecture: Architecture, layer: DecoderLayer, trained: bool, scratch: Scratch) -> Block:
    """
    Args:
        trained: whether the weights are trained; they are not fused then.
        scratch: where quantised weights are decoded.
    """
    qkv, out, up, down = architecture.members(layer)
    norm, after_attention, mlp_norm, after_mlp = architecture.norms(layer)
    q_norm, k_norm = architecture.head_norms(layer)
    shape, experts = architecture.shape, architecture.experts(layer)
    return Block(
        norm=norm,
        qkv=_projection(qkv, trained, scratch, (shape.heads, shape.kv_heads, shape.kv_heads)),
        q_norm=q_norm,
        k_norm=k_norm,
        out=_projection(out, trained, scratch),
        after_attention=after_attention,
        mlp_norm=mlp_norm,
        up=_projection(
            up, trained, scratch, (1, 1) if architecture.family.gated and experts is None else (1,)
        ),
        down=_projection(down, trained, scratch),
        after_mlp=after_mlp,
        experts=experts,
    )


def _projection(
    modules: list[LinearModule], trained: bool, scratch: Scratch, shares: tuple[int, ...] = (1,)
) -> Projection:
    """One fused projection.

    Args:
        shares: relative sizes of the parts that a single module gives (GPT-2's queries, keys and values).
    """
    if not modules:
        return NO_PROJECTION
    bases = [_base(module) for module in modules]
    sizes = tuple(_shape(base)[0] for base in bases)
    inputs = _shape(bases[0])[1]
    biases = [getattr(base, "bias", None) for base in bases]
    given = [bias for bias in biases if bias is not None]
    shown = sizes if len(sizes) > 1 else tuple(sizes[0] * share // sum(shares) for share in shares)
    if trained:
        weights = [_matrix(base) for base in bases]
        return Projection(tuple(weights), tuple(biases), shown, inputs, None)
    padding, uniform = _adapter_padding(modules)
    bias = None if not given else torch.cat([bias.detach() for bias in given])
    if quantized := [base for base in bases if isinstance(base, Linear4bit)]:
        inner = scratch.new_zeros(padding, inputs)
        packed = _joined_codes(quantized, padding, scratch)
        return Projection((), (bias,), shown, inputs, inner, uniform, packed)
    whole = bases[0].weight.new_zeros(sum(sizes), inputs + padding)
    for base, window in zip(bases, whole[:, :inputs].split(sizes), strict=True):
        window.copy_(_matrix(base).detach())
        base.weight.data = window.t() if isinstance(base, Conv1D) else window  # frees the old copy
    down = whole.new_zeros(padding, inputs) if padding else None
    return Projection((whole,), (bias,), shown, inputs, down, uniform=uniform)


def _joined_codes(bases: list[Linear4bit], padding: int, scratch: Scratch) -> QuantizedWeight:
    packed = join([base.nf4 for base in bases], padding, scratch)
    for base, part in zip(bases, packed.parts, strict=True):
        base.set_weight(part)  # frees the old copy
    return packed


def _adapter_padding(modules: list[LinearModule]) -> tuple[int, bool]:
    """Columns for the largest adapter, and whether all adapters have the same ranks."""
    names = {name for module in modules if isinstance(module, LoraLayer) for name in module.lora_A}
    ranks = {tuple(_rank(module, name) for module in modules) for name in names}
    return -(-max(map(sum, ranks), default=0) // PADDING_STEP) * PADDING_STEP, len(ranks) <= 1


def read_loras(architecture: Architecture, layer: DecoderLayer, adapter: str) -> Loras:
    """The adapter's live parameters."""
    return Loras(*(_lora(group, adapter) for group in architecture.members(layer)))


def _lora(modules: list[LinearModule], adapter: str) -> Lora | None:
    if not any(_has(module, adapter) for module in modules):
        return None
    down: list[Tensor] = []
    up: list[Tensor] = []
    scales: list[float] = []
    for module in modules:
        if _has(module, adapter):
            down.append(module.lora_A[adapter].weight)
            up.append(module.lora_B[adapter].weight)
            scales.append(float(module.scaling[adapter]))
        else:
            outputs, inputs = _shape(base := _base(module))
            down.append(base.weight.new_zeros(0, inputs, dtype=torch.float32))
            up.append(base.weight.new_zeros(outputs, 0, dtype=torch.float32))
            scales.append(1.0)
    return Lora(tuple(down), tuple(up), tuple(scales))


@torch.enable_grad()
def _matrix(base: nn.Linear | Conv1D) -> Tensor:
    """The weight as (out, in).

    Gradients are on: a view made without them never passes any on, and a trained matrix would not change.
    """
    return base.weight.t() if isinstance(base, Conv1D) else base.weight


def _shape(base: nn.Linear | Conv1D) -> tuple[int, int]:
    """Outputs and inputs; codes of 4 bits have another shape than their matrix."""
    shape = (base.out_features, base.in_features) if isinstance(base, Linear4bit) else _matrix(base).shape
    return shape[0], shape[1]


def _base(module: LinearModule) -> nn.Linear | Conv1D:
    return module.get_base_layer() if isinstance(module, LoraLayer) else module


def _has(module: LinearModule, adapter: str) -> TypeGuard[LoraLayer]:
    return isinstance(module, LoraLayer) and adapter in module.lora_A


def _rank(module: LinearModule, adapter: str) -> int:
    return len(module.lora_A[adapter].weight) if _has(module, adapter) else 0
