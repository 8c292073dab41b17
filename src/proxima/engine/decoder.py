"""`Decoder`: a decoder-only network as two pure functions a layer, over the live weights of a `transformers` model.

In: ids laid end to end, and an adapter's name. Out: hidden states where they are wanted. Weights that are multiplied with the
same input lie in one tensor (the model's own parameters become windows on it, so there is no second copy). Adapters are float32
and are cast where they are used, so products run in the base's type while gradients and optimiser states stay float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, relu, silu
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from proxima.engine.attention import packed_attention
from proxima.engine.layout import Layout

log = logging.getLogger(__name__)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
}
LLAMA_LIKE = ("llama", "qwen2", "qwen3", "mistral")


class Lora(NamedTuple):
    """One adapter on the members of a projection; a member without one has rank 0."""

    down: tuple[Tensor, ...]  # (r, in) each
    up: tuple[Tensor, ...]  # (out, r) each
    scales: tuple[float, ...]


class Fused(NamedTuple):
    """The same adapter as two matrices in the base's type, for decoding."""

    down: Tensor  # (sum r, in)
    up: Tensor  # (sum out, sum r), block-diagonal, scaled


class Projection(NamedTuple):
    """Linear maps of one input: all in one tensor, or one tensor each where they are trained themselves."""

    weights: tuple[Tensor, ...]  # (out, in) each
    biases: tuple[Tensor | None, ...]  # (out,) each
    sizes: tuple[int, ...]  # outputs of each member


class Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class Block(NamedTuple):
    """The weights of one layer."""

    norm: Norm
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Projection
    mlp_norm: Norm
    widen: Projection  # gate and up, or one wide layer
    narrow: Projection


class Loras(NamedTuple):
    """An adapter on one layer."""

    qkv: Lora | Fused | None = None
    out: Lora | Fused | None = None
    widen: Lora | Fused | None = None
    narrow: Lora | Fused | None = None


@dataclass(frozen=True)
class Shape:
    """What the functions of a layer need to know beside weights."""

    heads: int
    kv_heads: int
    head_size: int
    eps: float
    scale: float
    activation: str  # of a plain MLP; gated ones use silu


def project(x: Tensor, p: Projection, lora: Lora | Fused | None) -> tuple[Tensor, ...]:
    """Every member's output, adapter included: (N, in) -> (N, out) each."""
    parts = [linear(x, weight, bias) for weight, bias in zip(p.weights, p.biases, strict=True)]
    if len(p.weights) == len(p.sizes) > 1:  # one tensor each
        outputs = tuple(parts)
    else:
        (whole,) = parts
        if isinstance(lora, Fused):
            whole = torch.addmm(whole, linear(x, lora.down), lora.up.t())
        elif lora is not None and len(lora.down) == 1:
            whole = whole + linear(linear(x, lora.down[0].to(x.dtype)), (lora.scales[0] * lora.up[0]).to(x.dtype))
        outputs = whole.split(p.sizes, -1)
    if lora is None or isinstance(lora, Fused) or len(lora.down) == 1:
        return outputs
    small = linear(x, torch.cat(lora.down).to(x.dtype)).split([weight.shape[0] for weight in lora.down], -1)
    return tuple(
        base + linear(part, (scale * up).to(x.dtype)) if part.shape[-1] else base
        for base, part, up, scale in zip(outputs, small, lora.up, lora.scales, strict=True)
    )


def normalize(x: Tensor, norm: Norm, eps: float) -> Tensor:
    """Layer norm where there is a bias, else RMS norm in float32."""
    if norm.bias is not None:
        return layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, eps)
    wide = x.float()
    return norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on (N, H, D) with (N, D) angles."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def before_attention(
    x: Tensor, block: Block, loras: Loras, angles: tuple[Tensor, Tensor] | None, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, hidden) -> queries (N, H, D), keys and values (N, Hkv, D)."""
    q, k, v = project(normalize(x, block.norm, shape.eps), block.qkv, loras.qkv)
    q, k, v = (part.unflatten(-1, (-1, shape.head_size)) for part in (q, k, v))
    if block.q_norm is not None and block.k_norm is not None:
        q, k = normalize(q, Norm(block.q_norm, None), shape.eps), normalize(k, Norm(block.k_norm, None), shape.eps)
    if angles is not None:
        q, k = rotate(q, *angles), rotate(k, *angles)
    return q, k, v.contiguous()


def after_attention(x: Tensor, attended: Tensor, block: Block, loras: Loras, shape: Shape) -> Tensor:
    """Output projection, residual, MLP, residual."""
    (out,) = project(attended.flatten(1), block.out, loras.out)
    x = x + out
    wide = project(normalize(x, block.mlp_norm, shape.eps), block.widen, loras.widen)
    inner = silu(wide[0]) * wide[1] if len(wide) == 2 else ACTIVATIONS[shape.activation](wide[0])
    (out,) = project(inner, block.narrow, loras.narrow)
    return x + out


def supports(network: Any) -> bool:
    """Whether this is an architecture, with settings and adapters, that the decoder computes as `transformers` does."""
    config = network.config.get_text_config()
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
    layers = [module for module in network.modules() if isinstance(module, LoraLayer)]
    return usual and not any(_is_special(layer) for layer in layers) and not isinstance(head_of(network), LoraLayer)


def head_of(network: Any) -> Any:
    """The map from hidden states to logits; None for a bare decoder."""
    return network.get_output_embeddings()


def _is_special(layer: Any) -> bool:
    """An adapter that is more than down, up and scale, or on something else than a linear map."""
    return bool(
        any(getattr(layer, "use_dora", {}).values())
        or any(getattr(layer, "lora_bias", {}).values())
        or len(layer.lora_embedding_A)
        or not isinstance(layer.get_base_layer(), (nn.Linear, Conv1D))
    )


class Decoder:
    """Reads the weights of a network once; adapters are looked up by name at every call."""

    def __init__(self, network: Any, compiled: bool = False):
        """
        Args:
            compiled: let torch compile the functions of a layer (once for all layers); falls back with one line.
        """
        self.network, self.inner = network, network.base_model
        self.config = network.config.get_text_config()
        self.is_gpt2 = self.config.model_type == "gpt2"
        self.layers = self.inner.h if self.is_gpt2 else self.inner.layers
        self.trained = any(parameter.requires_grad for parameter in network.parameters() if parameter.dim() > 1)
        size = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        self.shape = Shape(
            heads=self.config.num_attention_heads,
            kv_heads=getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads,
            head_size=size,
            eps=self.config.layer_norm_epsilon if self.is_gpt2 else self.config.rms_norm_eps,
            scale=1.0 if self.is_gpt2 and not self.config.scale_attn_weights else size**-0.5,
            activation=self.config.activation_function if self.is_gpt2 else "",
        )
        self.checkpointing = False
        self._loras: dict[str, list[Loras]] = {}
        self.before: Callable[..., Any] = before_attention
        self.after: Callable[..., Any] = after_attention
        if compiled:
            self.compile()
        self.blocks = [self._block(layer) for layer in self.layers]

    def compile(self) -> None:
        """One compilation serves all layers, any number of tokens and any adapter, for they are arguments."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
        self.before = torch.compile(before_attention, dynamic=True)
        self.after = torch.compile(after_attention, dynamic=True)

    def hidden(self, ids: Tensor, layout: Layout, adapter: str | None) -> Tensor:
        """Normed last hidden states (M, hidden) at the layout's `read` places.

        Args:
            ids: (B, T), padded in any way; the layout says which are real.
        """
        x = self.run(ids.flatten()[layout.source], layout, self.loras(adapter))
        return self.final_norm(x[layout.read])

    def run(
        self, flat: Tensor, layout: Layout, loras: list[Loras], store: Callable[[int, Tensor, Tensor], None] | None = None
    ) -> Tensor:
        """All layers over (N,) ids; `store(layer, keys, values)` may keep what each layer attends to."""
        x, angles = self.embed(flat, layout.positions)
        for number, (block, lora) in enumerate(zip(self.blocks, loras, strict=True)):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(self._layer, x, block, lora, angles, layout, use_reentrant=False)
                continue
            q, k, v = self.before(x, block, lora, angles, self.shape)
            if store is not None:
                store(number, k, v)
            x = self.after(x, packed_attention(q, k, v, layout, self.shape.scale), block, lora, self.shape)
        return x

    def _layer(self, x: Tensor, block: Block, lora: Loras, angles: Any, layout: Layout) -> Tensor:
        q, k, v = self.before(x, block, lora, angles, self.shape)
        return self.after(x, packed_attention(q, k, v, layout, self.shape.scale), block, lora, self.shape)

    def embed(self, flat: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Token embeddings (N, hidden), and rotary angles where the architecture has them."""
        x = self.network.get_input_embeddings()(flat)
        if self.is_gpt2:
            return x + self.inner.wpe(positions), None
        cos, sin = self.inner.rotary_emb(x, positions.unsqueeze(0))
        return x, (cos[0], sin[0])

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V)."""
        return head_of(self.network)(hidden)

    def final_norm(self, x: Tensor) -> Tensor:
        last = self.inner.ln_f if self.is_gpt2 else self.inner.norm
        return normalize(x, Norm(last.weight, getattr(last, "bias", None)), self.shape.eps)

    # --- weights ---

    def _block(self, layer: Any) -> Block:
        if self.is_gpt2:
            return Block(
                norm=_norm(layer.ln_1),
                qkv=self._projection([layer.attn.c_attn], split=3),
                q_norm=None,
                k_norm=None,
                out=self._projection([layer.attn.c_proj]),
                mlp_norm=_norm(layer.ln_2),
                widen=self._projection([layer.mlp.c_fc]),
                narrow=self._projection([layer.mlp.c_proj]),
            )
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return Block(
            norm=_norm(layer.input_layernorm),
            qkv=self._projection([attention.q_proj, attention.k_proj, attention.v_proj]),
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            out=self._projection([attention.o_proj]),
            mlp_norm=_norm(layer.post_attention_layernorm),
            widen=self._projection([mlp.gate_proj, mlp.up_proj]),
            narrow=self._projection([mlp.down_proj]),
        )

    def _projection(self, modules: list[Any], split: int = 1) -> Projection:
        bases = [_base(module) for module in modules]
        weights = [base.weight.t() if isinstance(base, Conv1D) else base.weight for base in bases]
        sizes = tuple(len(weight) for weight in weights) if split == 1 else (len(weights[0]) // split,) * split
        biases = tuple(base.bias for base in bases)
        if self.trained or len(bases) == 1:
            return Projection(tuple(weights), biases, sizes)
        whole = torch.cat([weight.detach() for weight in weights])
        for base, window in zip(bases, whole.split(sizes), strict=True):
            base.weight.data = window  # the model's own parameter from now on: no second copy
        given = [bias.detach() for bias in biases if bias is not None]
        return Projection((whole,), (torch.cat(given) if given else None,), sizes)

    def _members(self, layer: Any) -> tuple[list[Any], ...]:
        if self.is_gpt2:
            return [layer.attn.c_attn], [layer.attn.c_proj], [layer.mlp.c_fc], [layer.mlp.c_proj]
        attention, mlp = layer.self_attn, layer.mlp
        return (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        )

    def loras(self, adapter: str | None) -> list[Loras]:
        """The adapter's live parameters, layer by layer."""
        if adapter is None:
            return [Loras()] * len(self.layers)
        if adapter not in self._loras:
            self._loras[adapter] = [
                Loras(*(self._lora(group, adapter) for group in self._members(layer))) for layer in self.layers
            ]
        return self._loras[adapter]

    def _lora(self, modules: list[Any], adapter: str) -> Lora | None:
        if not any(_has(module, adapter) for module in modules):
            return None
        down, up, scales = [], [], []
        for module in modules:
            if _has(module, adapter):
                down.append(module.lora_A[adapter].weight)
                up.append(module.lora_B[adapter].weight)
                scales.append(float(module.scaling[adapter]))
            else:
                weight = _base(module).weight
                rows, columns = weight.shape[::-1] if isinstance(_base(module), Conv1D) else weight.shape
                down.append(weight.new_zeros(0, columns, dtype=torch.float32))
                up.append(weight.new_zeros(rows, 0, dtype=torch.float32))
                scales.append(1.0)
        return Lora(tuple(down), tuple(up), tuple(scales))

    @torch.no_grad()
    def fused_loras(self, adapter: str | None) -> list[Loras]:
        """The adapter as it is now, ready for decoding."""
        dtype = self.blocks[0].qkv.weights[0].dtype

        def fuse(lora: Lora | Fused | None) -> Fused | None:
            if not isinstance(lora, Lora):
                return None
            up = torch.block_diag(*(scale * weight for weight, scale in zip(lora.up, lora.scales, strict=True)))
            return Fused(torch.cat(lora.down).to(dtype), up.to(dtype))

        return [Loras(*(fuse(group) for group in loras)) for loras in self.loras(adapter)]


def _norm(module: Any) -> Norm:
    return Norm(module.weight, getattr(module, "bias", None))


def _base(module: Any) -> Any:
    return module.get_base_layer() if isinstance(module, LoraLayer) else module


def _has(module: Any, adapter: str) -> bool:
    return isinstance(module, LoraLayer) and adapter in module.lora_A
