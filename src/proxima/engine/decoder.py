"""`Decoder`: a decoder-only network over the live weights of a `transformers` model, without padding.

In: ids laid end to end, and an adapter's name. Out: hidden states where they are wanted. Weights that are multiplied with the
same input lie in one tensor (the model's own parameters become windows on it, so there is no second copy). A layer is products
(see `products.py`), attention, and four small functions between them, which torch compiles on a GPU. Adapters stay float32 and
are cast when they are loaded, so products run in the base's type while gradients and optimiser states stay float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, relu, silu
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from proxima.engine.attention import packed_attention
from proxima.engine.graphs import Gradients, GraphedPass, Sizes
from proxima.engine.layout import Layout
from proxima.engine.products import Gate, Lora, Projection, copier, load_lora, product, windows

log = logging.getLogger(__name__)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
}
LLAMA_LIKE = ("llama", "qwen2", "qwen3", "mistral")
ROOM_STEP = 8  # inner sizes are multiples of this, for the alignment that fast products want

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


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

    qkv: Lora | None = None
    out: Lora | None = None
    widen: Lora | None = None
    narrow: Lora | None = None


@dataclass(frozen=True)
class Shape:
    """What the functions of a layer need to know beside weights."""

    heads: int
    kv_heads: int
    head_size: int
    eps: float
    scale: float
    activation: str  # of a plain MLP; gated ones use silu


# --- the functions between products ---


def normalize(x: Tensor, norm: Norm, eps: float) -> Tensor:
    """Layer norm where there is a bias, else RMS norm in float32."""
    if norm.bias is not None:
        return layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, eps)
    wide = x.float()
    return norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def first_norm(x: Tensor, norm: Norm, room: int, eps: float) -> Tensor:
    """(N, D) -> normed (N, D + room), with room for an adapter's inner values beside it."""
    normed = normalize(x, norm, eps)
    return torch.cat([normed, normed.new_zeros(len(x), room)], -1) if room else normed


def add_and_norm(x: Tensor, change: Tensor, norm: Norm, room: int, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after a change, and its norm as `first_norm` gives it."""
    x = x + change
    return x, first_norm(x, norm, room, eps)


def add_then_norm(norm_function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The same in two steps, for training: only the sum is kept for the backward pass, not both of its parts."""

    def both(x: Tensor, change: Tensor, norm: Norm, room: int, eps: float) -> tuple[Tensor, Tensor]:
        x = x + change
        return x, norm_function(x, norm, room, eps)

    return both


def split_heads(
    qkv: Tensor, sizes: tuple[int, ...], q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    shape: Shape,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(N, q + k + v) -> queries (N, H, D), keys and values (N, Hkv, D); normed and rotated where the architecture does so."""
    q, k, v = (part.unflatten(-1, (-1, shape.head_size)) for part in qkv.split(sizes, -1))
    if q_norm is not None and k_norm is not None:
        q, k = normalize(q, Norm(q_norm, None), shape.eps), normalize(k, Norm(k_norm, None), shape.eps)
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on (N, H, D) with (N, D) angles."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def activate(wide: Tensor, sizes: tuple[int, ...], activation: str) -> Tensor:
    """The inside of the MLP: silu(gate) * up, or one activation."""
    if len(sizes) == 1:
        return ACTIVATIONS[activation](wide)
    gate, up = wide.split(sizes, -1)
    return silu(gate) * up


class Functions(NamedTuple):
    """The four, compiled or not, or other code that gives the same."""

    first_norm: Callable[..., Tensor] = first_norm
    add_and_norm: Callable[..., tuple[Tensor, Tensor]] = add_and_norm
    split_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = split_heads
    activate: Callable[..., Tensor] = activate
    gate: Gate | None = None  # instead of `activate`, as one with the product after it

    def compiled(self, dynamic: bool) -> Functions:
        """Backward passes compute again what is between a function's inputs and outputs: it is cheap, and memory is not."""
        torch._functorch.config.activation_memory_budget = 0.0
        made: Any = [torch.compile(_copy_of(function), dynamic=dynamic) for function in self[:4]]
        return Functions(*made)


# --- what the decoder can do ---


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
    """Reads the weights of a network once; adapters are looked up by name, and loaded, at every call."""

    def __init__(self, network: Any, compiled: bool = False):
        """
        Args:
            compiled: let torch compile the functions between products; without a compiler one line says so.
        """
        self.network, self.inner = network, network.base_model
        self.config = network.config.get_text_config()
        self.is_gpt2 = self.config.model_type == "gpt2"
        self.layers = self.inner.h if self.is_gpt2 else self.inner.layers
        members = [module for group in self._members(self.layers[0]) for module in group]
        self.trained = any(_base(module).weight.requires_grad for module in members)
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
        self.blocks = [self._block(layer) for layer in self.layers]
        self.functions = self.train_functions = Functions()
        self._loras: dict[str, list[Loras]] = {}
        self._passes: dict[str | None, GraphedPass] = {}
        self._sizes = Sizes(0, 0, 0, 0)
        self.compiled = compiled and self._can_compile()
        if self.compiled:  # any number of tokens for generation, one fixed number for training
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
            self.functions, trained = Functions().compiled(dynamic=True), Functions().compiled(dynamic=False)
            self.train_functions = trained._replace(add_and_norm=add_then_norm(trained.first_norm))
        if self.graphed:
            self.train_functions = self._by_hand(self.train_functions)

    def _by_hand(self, functions: Functions) -> Functions:
        """The same with Triton kernels, where there are any for this architecture; for weights that are not trained."""
        try:
            from proxima.engine.kernels import gate, heads
        except ImportError:
            return functions
        if self.is_gpt2:
            return functions
        functions = functions._replace(gate=Gate(gate.gate, gate.ungate))
        return functions._replace(split_heads=heads.split_heads) if heads.fits(self.shape) else functions

    def _can_compile(self) -> bool:
        try:
            torch.compile(_probe, dynamic=False)(torch.ones(8, device=self.blocks[0].norm.weight.device))
            return True
        except Exception as error:  # whatever is missing: Triton, a C compiler, a writable cache
            log.warning("layers are not compiled, the run is slower: %s", str(error).strip().splitlines()[0])
            return False

    # --- passes ---

    def hidden(self, ids: Tensor, layout: Layout, adapter: str | None) -> Tensor:
        """Normed last hidden states (M, hidden) at the layout's `read` places.

        Args:
            ids: (B, T), padded in any way; the layout says which are real.
        """
        if self.graphed:
            return self._graphed(layout, adapter)(ids, layout)
        self.load(adapter)
        return self.run(ids.flatten()[layout.source], layout, self.loras(adapter), read=layout.read)

    def run(
        self,
        flat: Tensor,
        layout: Layout,
        loras: list[Loras],
        attend: Attend | None = None,
        read: Tensor | None = None,
        functions: Functions | None = None,
    ) -> Tensor:
        """Normed last hidden states (N, hidden) of (N,) ids, or (M, hidden) of those in `read`; of the adapter that is loaded.

        Args:
            loras: the parameters that gradients go to.
            attend: (layer, q, k, v) -> attended; by default each sequence of the layout to itself.
        """
        functions = functions or self.functions
        x, cos, sin = self.embed(flat, layout.positions)
        normed = functions.first_norm(x, self.blocks[0].norm, self.blocks[0].qkv.room, self.shape.eps)

        def by_layout(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return packed_attention(q, k, v, layout, self.shape.scale)

        for number, lora in enumerate(loras):
            wanted = read if number + 1 == len(loras) else None
            given = (number, x, normed, lora, cos, sin, attend or by_layout, functions, wanted)
            if self.checkpointing and torch.is_grad_enabled():
                x, normed = checkpoint(self._layer, *given, use_reentrant=False)
            else:
                x, normed = self._layer(*given)
        return normed

    def _layer(
        self, number: int, x: Tensor, normed: Tensor, lora: Loras, cos: Any, sin: Any, attend: Attend, functions: Functions,
        read: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The residual stream after this layer, and its norm as the next layer wants it; of all tokens, or those in `read`."""
        block, shape = self.blocks[number], self.shape
        qkv = product(normed, block.qkv, lora.qkv)
        q, k, v = functions.split_heads(qkv, block.qkv.sizes, block.q_norm, block.k_norm, cos, sin, shape)
        attended = attend(number, q, k, v).flatten(1)
        if read is not None:  # the last layer's other outputs are nobody's input
            x, attended = x[read], attended[read]
        out = product(attended, block.out, lora.out)
        x, normed = functions.add_and_norm(x, out, block.mlp_norm, block.widen.room, shape.eps)
        wide = product(normed, block.widen, lora.widen)
        if functions.gate is not None and block.narrow.room:
            narrow = product(wide, block.narrow, lora.narrow, functions.gate)
        else:
            narrow = product(functions.activate(wide, block.widen.sizes, shape.activation), block.narrow, lora.narrow)
        last = number + 1 == len(self.blocks)
        norm, room = (self._last_norm, 0) if last else (self.blocks[number + 1].norm, self.blocks[number + 1].qkv.room)
        return functions.add_and_norm(x, narrow, norm, room, shape.eps)

    def embed(self, flat: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Token embeddings (N, hidden), and rotary angles where the architecture has them."""
        x = self.network.get_input_embeddings()(flat)
        if self.is_gpt2:
            return x + self.inner.wpe(positions), None, None
        cos, sin = self.inner.rotary_emb(x, positions.unsqueeze(0))
        return x, cos[0], sin[0]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V)."""
        return head_of(self.network)(hidden)

    @property
    def _last_norm(self) -> Norm:
        return _norm(self.inner.ln_f if self.is_gpt2 else self.inner.norm)

    # --- passes as CUDA graphs ---

    @property
    def graphed(self) -> bool:
        """Whether passes run as CUDA graphs: with adapters on half-precision weights on a GPU."""
        weight = self.blocks[0].norm.weight
        return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and not self.trained

    def _graphed(self, layout: Layout, adapter: str | None) -> GraphedPass:
        """The adapter's pass, captured when first asked for or when a batch does not fit any more."""
        if not self._sizes.holds(layout):
            self._sizes = self._sizes.grown(layout)
            self._passes.clear()
        if adapter not in self._passes:
            given = self.loras(adapter) if adapter is not None else self._silent_loras()
            loras = [
                Loras(*(group and _with_sinks(group, part) for group, part in zip(lora, _parts(block), strict=True)))
                for lora, block in zip(given, self.blocks, strict=True)
            ]
            groups = [group for lora in loras for group in lora if group is not None]
            found = [window for group in groups for window in windows(group, *group.sinks)]
            kept = {weight: torch.zeros_like(weight) for weight, _, _ in found}
            collect = copier([(window, kept[weight], scale) for weight, window, scale in found])
            gradients = Gradients(kept, [sink for group in groups for sink in group.sinks], collect)
            load = self._loader(adapter)

            def run(flat: Tensor, layout: Layout) -> Tensor:
                load()
                return self.run(flat, layout, loras, read=layout.read, functions=self.train_functions)

            pool = next(iter(self._passes.values())).pool if self._passes else None
            self._passes[adapter] = GraphedPass(run, gradients, self._sizes, layout.read.device, pool)
        return self._passes[adapter]

    def _loader(self, adapter: str | None) -> Callable[[], None]:
        """`load` for a graph: all matrices in one launch, where Triton is there."""
        projections = [part for block in self.blocks for part in _parts(block)]
        groups = [group for loras in self.loras(adapter) for group in loras]
        if adapter is None or not all(groups) or not all(part.uniform for part in projections):
            return lambda: self.load(adapter)
        return copier(
            [
                copy
                for part, group in zip(projections, groups, strict=True)
                if group is not None and part.down is not None
                for copy in windows(group, part.down, part.weights[0][:, part.inputs :])
            ]
        )

    def _silent_loras(self) -> list[Loras]:
        """For a role without an adapter: parameters that are never loaded, so that it runs the same code as the others."""
        if not self._loras:
            return [Loras()] * len(self.layers)
        like = next(iter(self._loras.values()))

        def silent(lora: Lora | None) -> Lora | None:
            if lora is None:
                return None
            down, up = (tuple(nn.Parameter(torch.zeros_like(weight)) for weight in side) for side in (lora.down, lora.up))
            return Lora(down, up, lora.scales)

        return [Loras(*(silent(group) for group in loras)) for loras in like]

    # --- weights ---

    def _block(self, layer: Any) -> Block:
        qkv, out, widen, narrow = self._members(layer)
        norms = (layer.ln_1, layer.ln_2) if self.is_gpt2 else (layer.input_layernorm, layer.post_attention_layernorm)
        attention = layer.attn if self.is_gpt2 else layer.self_attn
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return Block(
            norm=_norm(norms[0]),
            qkv=self._projection(qkv, split=3 if self.is_gpt2 else 1),
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            out=self._projection(out),
            mlp_norm=_norm(norms[1]),
            widen=self._projection(widen),
            narrow=self._projection(narrow),
        )

    def _members(self, layer: Any) -> tuple[list[Any], ...]:
        """The modules of each projection."""
        if self.is_gpt2:
            return [layer.attn.c_attn], [layer.attn.c_proj], [layer.mlp.c_fc], [layer.mlp.c_proj]
        attention, mlp = layer.self_attn, layer.mlp
        return (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        )

    def _projection(self, modules: list[Any], split: int = 1) -> Projection:
        bases = [_base(module) for module in modules]
        weights = [_matrix(base) for base in bases]
        sizes = tuple(len(weight) for weight in weights)
        inputs = weights[0].shape[1]
        given = [base.bias for base in bases if base.bias is not None]
        shown = (sizes[0] // split,) * split if split > 1 else sizes
        if self.trained:
            return Projection(tuple(weights), tuple(base.bias for base in bases), shown, inputs, None)
        names = {name for module in modules if isinstance(module, LoraLayer) for name in module.lora_A}
        ranks = {tuple(len(module.lora_A[name].weight) if _has(module, name) else 0 for module in modules) for name in names}
        room = -(-max(map(sum, ranks), default=0) // ROOM_STEP) * ROOM_STEP
        whole = weights[0].new_zeros(sum(sizes), inputs + room)
        for base, weight, window in zip(bases, weights, whole[:, :inputs].split(sizes), strict=True):
            window.copy_(weight.detach())
            base.weight.data = window.t() if isinstance(base, Conv1D) else window  # from now on: there is no second copy
        bias = None if not given else torch.cat([bias.detach() for bias in given])
        down = whole.new_zeros(room, inputs) if room else None
        return Projection((whole,), (bias,), shown, inputs, down, uniform=len(ranks) <= 1)

    def loras(self, adapter: str | None) -> list[Loras]:
        """The adapter's live parameters, layer by layer."""
        if adapter is None:
            return [Loras()] * len(self.layers)
        if adapter not in self._loras:
            self._loras[adapter] = [Loras(*(_lora(group, adapter) for group in self._members(layer))) for layer in self.layers]
        return self._loras[adapter]

    def load(self, adapter: str | None) -> None:
        """Put an adapter's weights, as they are now, where the products read them."""
        for block, loras in zip(self.blocks, self.loras(adapter), strict=True):
            for projection, lora in zip(_parts(block), loras, strict=True):
                load_lora(projection, lora)


def _parts(block: Block) -> tuple[Projection, ...]:
    """The projections, in the order of `Loras`."""
    return block.qkv, block.out, block.widen, block.narrow


def _with_sinks(lora: Lora, p: Projection) -> Lora:
    sizes = (p.room, p.inputs), (sum(p.sizes), p.room)
    return lora._replace(sinks=tuple(torch.zeros(size, device=p.weights[0].device) for size in sizes))


def _lora(modules: list[Any], adapter: str) -> Lora | None:
    if not any(_has(module, adapter) for module in modules):
        return None
    down, up, scales = [], [], []
    for module in modules:
        if _has(module, adapter):
            down.append(module.lora_A[adapter].weight)
            up.append(module.lora_B[adapter].weight)
            scales.append(float(module.scaling[adapter]))
        else:
            weight = _matrix(_base(module))
            down.append(weight.new_zeros(0, weight.shape[1], dtype=torch.float32))
            up.append(weight.new_zeros(weight.shape[0], 0, dtype=torch.float32))
            scales.append(1.0)
    return Lora(tuple(down), tuple(up), tuple(scales))


@torch.enable_grad()
def _matrix(base: Any) -> Tensor:
    """(out, in). A view that is made without gradients passes none on, ever: a trained matrix would stay as it was."""
    return base.weight.t() if isinstance(base, Conv1D) else base.weight


def _norm(module: Any) -> Norm:
    return Norm(module.weight, getattr(module, "bias", None))


def _base(module: Any) -> Any:
    return module.get_base_layer() if isinstance(module, LoraLayer) else module


def _has(module: Any, adapter: str) -> bool:
    return isinstance(module, LoraLayer) and adapter in module.lora_A


def _probe(x: Tensor) -> Tensor:
    return 2 * x + 1


def _copy_of(function: Any) -> Callable[..., Any]:
    """The same function as another object: compiled apart, for other shapes."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
