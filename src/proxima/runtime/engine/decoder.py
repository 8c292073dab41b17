"""`Decoder`: a decoder-only network over the live weights of a `transformers` model, without padding.

In: packed ids and an adapter's name. Out: hidden states at the positions that are read. A layer is matrix
products (`lora_products.py`), attention, and four small functions between them (`layer_functions.py`).
Adapters stay float32 and are cast when they are loaded: products run in the base's dtype, gradients and
optimiser states stay float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from proxima.runtime.engine.architecture import Architecture
from proxima.runtime.engine.attention_rules import ruled_packed_attention
from proxima.runtime.engine.experts import Routing, experts_output
from proxima.runtime.engine.graphed_passes import GraphedPasses
from proxima.runtime.engine.layer_functions import (
    NO_NORM,
    Functions,
    Norm,
    add_then_norm,
    can_compile,
    kernel_functions,
    with_gate_kernel,
)
from proxima.runtime.engine.layer_weights import Block, Loras, read_block, read_loras, trains_base_weights
from proxima.runtime.engine.layout import Layout, pack_mask
from proxima.runtime.engine.lora_products import load_lora, product
from proxima.runtime.engine.packed_attention import packed_attention
from proxima.runtime.engine.quantized_weights import Scratch
from proxima.runtime.engine.vocabulary import kernels_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """Reads the weights of a network once; an adapter is looked up by name and loaded at every call."""

    def __init__(self, network: PreTrainedModel, compiled: bool = False):
        """
        Args:
            compiled: let torch compile the functions between products, where it can.
        """
        self.architecture = Architecture(network)
        self.shape = self.architecture.shape
        self.suits_kernels = self.architecture.suits_kernels
        self.rules = self.architecture.rules
        self.trained = trains_base_weights(self.architecture)
        scratch = Scratch(self.weight)
        self.blocks = [
            read_block(self.architecture, layer, self.trained, scratch) for layer in self.architecture.layers
        ]
        if self.weight.is_cuda:
            torch.accelerator.empty_cache()  # the memory of the weights that were fused
        self.checkpointing = False
        self.known_loras: dict[str, list[Loras]] = {}
        self.graphed_passes = GraphedPasses(self)
        self.functions = self.train_functions = Functions()
        own = (
            kernel_functions(self.shape, self.weight.device) if self.graphed and self.suits_kernels else None
        )
        if own is not None:
            self.functions, self.train_functions = own
            compile_kernels(self)
        self.compiled = compiled and own is None and can_compile(self.weight.device)
        if self.compiled:  # any number of tokens for generation, one fixed number for training
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
            self.functions, trained = Functions().compiled(dynamic=True), Functions().compiled(dynamic=False)
            self.train_functions = trained._replace(add_and_norm=add_then_norm(trained.first_norm))
        if self.graphed and self.suits_kernels and own is None:
            self.train_functions = with_gate_kernel(self.train_functions)

    @property
    def weight(self) -> Tensor:
        """One of its weights, for the dtype and device of all."""
        return self.architecture.last_norm.weight

    @property
    def half(self) -> bool:
        return self.weight.dtype in (torch.bfloat16, torch.float16)

    @property
    def capturable(self) -> bool:
        """Whether a decode step can be a CUDA graph: it asks the device nothing."""
        return all(block.experts is None or block.experts.grouped for block in self.blocks)

    @property
    def graphed(self) -> bool:
        """Whether passes run as CUDA graphs: adapters on half-precision weights on a GPU, where no attention
        needs to know how long sequences are, and none on experts."""
        adapted = any(block.experts is not None and block.experts.are_adapted for block in self.blocks)
        fixed = self.capturable and not adapted and not any(map(any, self.rules))
        return self.weight.is_cuda and self.half and not self.trained and fixed

    # --- passes ---

    def hidden(
        self,
        ids: Tensor,
        layout: Layout,
        adapter: str | None,
        dropout: float = 0.0,
        experts: Tensor | None = None,
    ) -> Tensor:
        """Normalised last hidden states (M, hidden) at the layout's `read` positions.

        Args:
            ids: (B, T), padded in any way; the layout says which are real.
            dropout: on the adapter's inputs, with gradients on.
            experts: (B, T, L, K) recorded ones, to be replayed.
        """
        recorded = None if experts is None else experts.flatten(0, 1)[layout.source]
        rate = dropout if torch.is_grad_enabled() else 0.0
        # the graph of a backward pass would draw other masks for the layers that it computes again
        redraws = self.checkpointing and rate > 0
        if self.graphed and not redraws:
            return self.graphed_passes(ids, layout, adapter, rate, recorded)
        self.load(adapter)
        loras, routing = self.loras(adapter, dropout), Routing(recorded)
        given = (self.train_functions if self.graphed else self.functions, routing)
        return self.run(ids.flatten()[layout.source], layout, loras, None, layout.read, *given)

    def plain_hidden(self, ids: Tensor) -> Tensor:
        """Normalised last hidden states (T, hidden) of one sequence (T,), without adapters, graphs or
        compiled functions."""
        self.load(None)
        layout = pack_mask(torch.ones_like(ids, dtype=torch.bool).unsqueeze(0))
        return self.run(ids, layout, self.loras(None), functions=Functions())

    def run(
        self,
        flat: Tensor,
        layout: Layout,
        loras: list[Loras],
        attend: Attend | None = None,
        read: Tensor | None = None,
        functions: Functions | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Normalised last hidden states (N, hidden) of (N,) ids, or (M, hidden) of those in `read`, with the
        loaded adapter.

        Args:
            loras: the parameters that receive gradients.
            attend: (layer, q, k, v) -> attended; by default each sequence of the layout attends to itself.
            routing: of the N tokens to experts; by default as their routers say.
        """
        functions, routing = functions or self.functions, routing or Routing()
        x, angles = self.architecture.embed(flat, layout.positions)
        normed = functions.first_norm(x, self.blocks[0].norm, self.blocks[0].qkv.padding, self.shape.eps)

        def by_layout(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attend(number, q, k, v, layout)

        attend = attend or by_layout
        drops = any(part is not None and part.dropout > 0 for lora in loras for part in lora)
        for number, lora in enumerate(loras):
            wanted = read if number + 1 == len(loras) else None
            given = (number, x, normed, lora, *angles[number], attend, functions, wanted, routing)
            if self.checkpointing and torch.is_grad_enabled():
                x, normed = checkpoint(self._layer, *given, use_reentrant=False, preserve_rng_state=drops)
            else:
                x, normed = self._layer(*given)
        return normed

    def _layer(
        self, number: int, x: Tensor, normed: Tensor, lora: Loras, cos: Tensor | None, sin: Tensor | None,
        attend: Attend, functions: Functions, read: Tensor | None, routing: Routing,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The residual stream after this layer, and its norm as the next layer reads it; of all tokens, or
        of those in `read`."""
        block = self.blocks[number]
        shape = self.shape
        qkv = product(normed, block.qkv, lora.qkv)
        q, k, v = functions.split_heads(qkv, block.qkv.sizes, block.q_norm, block.k_norm, cos, sin, shape)
        attended = attend(number, q, k, v).flatten(1)
        if read is not None:  # no layer reads the other outputs of the last one
            x, attended = x[read], attended[read]
        out = product(attended, block.out, lora.out)
        out = self._change(out, block.after_attention, functions)
        x, normed = functions.add_and_norm(x, out, block.mlp_norm, block.up.padding, shape.eps)
        if block.experts is None:
            mlp_out = self._mlp(block, normed, lora, functions)
        else:
            mlp_out = self._experts(number, normed, lora, functions, read, routing)
        mlp_out = self._change(mlp_out, block.after_mlp, functions)
        if number + 1 == len(self.blocks):
            return functions.add_and_norm(x, mlp_out, self.architecture.last_norm, 0, shape.eps)
        after = self.blocks[number + 1]
        return functions.add_and_norm(x, mlp_out, after.norm, after.qkv.padding, shape.eps)

    def _mlp(self, block: Block, x: Tensor, lora: Loras, functions: Functions) -> Tensor:
        wide = product(x, block.up, lora.up)
        if functions.gate is not None and block.down.padding:
            return product(wide, block.down, lora.down, functions.gate)
        inside = functions.activate(wide, block.up.sizes, self.shape.activation)
        return product(inside, block.down, lora.down)

    def _experts(
        self, number: int, x: Tensor, lora: Loras, functions: Functions, read: Tensor | None, routing: Routing
    ) -> Tensor:
        block = self.blocks[number]
        assert block.experts is not None
        sizes = (block.experts.down.weight.shape[2],) * 2
        shares = torch.softmax(product(x, block.up, lora.up), -1, dtype=torch.float32)
        chosen = routing.choose(number, shares.detach(), block.experts.per_token, read)
        return experts_output(
            x[:, : block.up.inputs],
            block.experts,
            shares,
            chosen,
            lambda wide: functions.activate(wide, sizes, self.shape.activation),
        )

    def _change(self, out: Tensor, norm: Norm, functions: Functions) -> Tensor:
        """What attention or MLP adds to the residual stream."""
        if norm is not NO_NORM:
            out = functions.first_norm(out, norm, 0, self.shape.eps)
        return out if self.shape.residual_factor == 1 else out * self.shape.residual_factor

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Attention of a layer, of each sequence to itself: (N, H, D), (N, Hkv, D) twice -> (N, H, D)."""
        rule, scale = self.rules[number], self.shape.scale
        if any(rule) and rule.changes(layout.longest):
            return ruled_packed_attention(q, k, v, layout, scale, rule)
        return packed_attention(q, k, v, layout, scale, self.blocks[number].out.padding)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V)."""
        return self.architecture.head(hidden)

    # --- adapters ---

    def loras(self, adapter: str | None, dropout: float = 0.0) -> list[Loras]:
        """The adapter's live parameters, layer by layer; empty `Loras` without an adapter."""
        if adapter is None:
            return [Loras()] * len(self.blocks)
        if adapter not in self.known_loras:
            self.known_loras[adapter] = [
                read_loras(self.architecture, layer, adapter) for layer in self.architecture.layers
            ]
        known = self.known_loras[adapter]
        return [loras.with_dropout(dropout) for loras in known] if dropout else known

    def load(self, adapter: str | None) -> None:
        """Copy an adapter's current weights to where the products read them."""
        for block, loras in zip(self.blocks, self.loras(adapter), strict=True):
            for projection, lora in zip(block.projections, loras, strict=True):
                load_lora(projection, lora)
            if block.experts is not None:
                block.experts.up.load(adapter)
                block.experts.down.load(adapter)


def compile_kernels(decoder: Decoder) -> None:
    """Compile the kernels of training side by side; one that fails says so where it is first needed."""
    from proxima.runtime.engine.kernels import run_together, training_calls

    device = decoder.weight.device
    with suppress(Exception):
        run_together([*training_calls(decoder), lambda: kernels_run(device)], device)
