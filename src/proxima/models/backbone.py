"""`Backbone`: one network in memory and the adapters on it. From token ids to hidden states and logits.

Passes take the fast path (`proxima.runtime.engine`) where it supports the network; otherwise the reference
path, which is `transformers`' own forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from proxima.core.context_length import context_length
from proxima.core.linear4bit import is_quantized
from proxima.models.passes import Passes
from proxima.models.probe import fast_path_problem, probe
from proxima.runtime import FAST_PATH
from proxima.runtime.distributed import Lockstep, decoder_layers, shard_network
from proxima.runtime.engine import (
    Decoder,
    Generation,
    Layout,
    PassCapacity,
    SamplingMemory,
    knows,
    network_logits,
    supports,
    worth_compiling,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")

ADAPTED = (BaseTunerLayer, AuxiliaryTrainingWrapper)
"""Modules that hold parts of an adapter: LoRA layers, and modules or tokens that are trained in full with
them."""


@dataclass
class EngineSettings:
    """How a backbone computes. Results do not depend on it."""

    fast: bool = True
    compiled: bool = True
    checkpointing: bool = False
    by_size: bool = False
    """Passes for batches of several sizes: see `GraphedPasses`."""
    sampling_memory: Callable[[], SamplingMemory] | None = None
    """Bounds the memory of sampling: see `Generation`."""
    pass_capacity: Callable[[], PassCapacity | None] | None = None
    """That of passes at present: see `GraphedPasses`."""


class Backbone:
    """A pretrained network with any number of adapters, of which at most one is active at a time.

    Dropout is off.
    """

    def __init__(self, network: PreTrainedModel):
        self.network = network.eval().requires_grad_(False)
        self.peft: PeftModel | None = None
        self._active: str | None = None
        self.settings = EngineSettings()
        self._known: bool | None = None
        self._agrees = False
        self._passes: Passes | None = None
        self.adapts_head = False
        """Whether an adapter changes what comes after the layers, such as the output embeddings."""
        self.quantized = is_quantized(network)
        """Whether its linear layers are in 4 bits."""
        self._supported: bool | None = None
        self._base_drops: bool | None = None
        self._parameters: dict[str, list[nn.Parameter]] = {}
        self._decoder: Decoder | None = None
        self._generation: Generation | None = None
        self.lockstep: Lockstep | None = None

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def hidden_size(self) -> int:
        return self.passes.width

    @property
    def context_length(self) -> int | None:
        """Most tokens that the network can read; None where its config names no limit."""
        limit = context_length(self.network.config)
        return None if limit is None else limit - (self.passes.first_position or 0)

    # --- adapters ---

    def attach(self, peft: PeftModel) -> None:
        """Use a PeftModel that wraps this network; none of its adapters is active."""
        self.peft = peft
        self._supported = self._base_drops = self._decoder = self._generation = None
        self._parameters.clear()
        self.network.eval()
        self._switch(None)
        within = set(self.passes.trunk.modules())
        self.adapts_head = any(
            isinstance(layer, ADAPTED) and layer not in within for layer in self.network.modules()
        )
        self._untie()

    def _untie(self) -> None:
        """Untie input and output embeddings where an adapter is on one of them: merged into the shared weight
        it would change both."""
        config = self.network.config
        one = self.network.get_input_embeddings()
        other = self.network.get_output_embeddings()
        adapted = isinstance(one, BaseTunerLayer) != isinstance(other, BaseTunerLayer)
        if any(isinstance(layer, ModulesToSaveWrapper) for layer in (one, other)):
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = (
                one.weight is other.weight
            )
        elif adapted and one.weight is other.weight:
            base = other.get_base_layer() if isinstance(other, BaseTunerLayer) else other
            base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False

    def _switch(self, adapter: str | None) -> None:
        for layer in self.network.modules():
            if isinstance(layer, ADAPTED):
                here = adapter is not None and any(adapter in group for group in _groups(layer))
                if here:
                    layer.set_adapter(adapter)
                layer.enable_adapters(here)
        self._active = adapter

    @contextmanager
    def using(self, adapter: str | None) -> Iterator[None]:
        """Only this adapter is active inside the block; afterwards the one that was before."""
        before = self._active
        if adapter != before:
            self._switch(adapter)
        try:
            yield
        finally:
            if adapter != before:
                self._switch(before)

    def adapter_parameters(self, adapter: str) -> list[nn.Parameter]:
        if adapter in self._parameters:
            return self._parameters[adapter]
        found: dict[int, nn.Parameter] = {}
        for layer in self.network.modules():
            if isinstance(layer, ADAPTED):
                for group in _groups(layer):
                    if adapter in group:
                        item = group[adapter]
                        own = [item] if isinstance(item, nn.Parameter) else list(item.parameters())
                        found |= {id(parameter): parameter for parameter in own}
        self._parameters[adapter] = list(found.values())
        return self._parameters[adapter]

    # --- passes ---

    @property
    def decoder(self) -> Decoder | None:
        """The fast path, made at first use; None where it does not support this network or this device, or
        where the base itself has dropout and trains.

        It reads full weights, so a sharded network cannot use it. When it is made, a few tokens are compared
        with the network's own forward pass: where they differ, the network counts as unknown.
        """
        if (
            not self.settings.fast
            or (self.network.training and self.base_drops)
            or self.sharded
            or self.device.type not in FAST_PATH
        ):
            return None
        if self._supported is None:
            self._supported = self.known and supports(self.network)
        if not self._supported:
            return None
        if self._decoder is None:
            self._decoder = self._make_decoder()
        return self._decoder

    def _make_decoder(self) -> Decoder | None:
        wanted = self.settings.compiled and self.device.type == "cuda"
        decoder = Decoder(self.network, wanted and worth_compiling(self.network.num_parameters()))
        decoder.checkpointing = self.settings.checkpointing
        decoder.graphed_passes.by_size = self.settings.by_size
        if self.settings.pass_capacity is not None:
            decoder.graphed_passes.planned = self.settings.pass_capacity
        if self._agrees:  # adapters change no declaration of a family
            return decoder
        with self.using(None):
            problem = fast_path_problem(self.network, decoder)
        self._agrees = not problem
        if self._agrees:
            return decoder
        log.warning(
            "the fast path is not used: its logits of %s are not the network's own (%s); please report this",
            self.network.config.model_type,
            problem,
        )
        self._known, self._supported, self._passes = False, False, None
        return None

    @property
    def generation(self) -> Generation | None:
        if self.decoder is None:
            return None
        if self._generation is None:
            self._generation = Generation(self.decoder, self.settings.sampling_memory)
        return self._generation

    def release_generation(self) -> tuple[int, int]:
        """Free the memory that sampling keeps from one call to the next; slots of its cache, and tokens of
        each."""
        size = (0, 0) if self._generation is None else self._generation.cache_size
        self._generation = None
        return size

    def hidden(
        self, ids: Tensor, layout: Layout, adapter: str | None, experts: Tensor | None = None
    ) -> Tensor:
        """Last hidden states (M, D) at the layout's `read` positions of ids (B, T), with one adapter.

        Args:
            experts: (B, T, L, K) recorded ones of a mixture, which the fast path replays.
        """
        if self.decoder is not None:
            return self.decoder.hidden(ids, layout, adapter, self._dropout(adapter), experts)
        with self.using(adapter):
            return self.reference_hidden(ids, layout)

    def _dropout(self, adapter: str | None) -> float:
        """Rate of dropout on an adapter's inputs: 0 but in training mode."""
        if adapter is None or self.peft is None or not self.network.training:
            return 0.0
        return float(getattr(self.peft.peft_config[adapter], "lora_dropout", 0.0))

    @property
    def base_drops(self) -> bool:
        """Whether the base, apart from adapters, has dropout in training mode."""
        if self._base_drops is None:
            config = self.network.config.get_text_config()
            self._base_drops = bool(getattr(config, "attention_dropout", 0.0)) or any(
                isinstance(module, nn.Dropout) and module.p > 0 and "lora_dropout" not in name
                for name, module in self.network.named_modules()
            )
        return self._base_drops

    def head(self, hidden: Tensor, adapter: str | None) -> Tensor:
        """Logits (M, V) of hidden states (M, D), with one adapter."""
        if self.known and not self.adapts_head:
            return network_logits(self.network, hidden)
        with self.using(adapter) if self.adapts_head else nullcontext():
            return self.passes.logits(hidden)

    # --- the reference path: `transformers`' own forward pass ---

    @property
    def passes(self) -> Passes:
        """How the network's own forward pass is called; found out at first use, before sharding."""
        if self._passes is None:
            with self.using(None):
                self._passes = Passes.known(self.network) if self.known else probe(self.network)
        return self._passes

    @property
    def known(self) -> bool:
        """Whether the fast path knows this architecture, whatever adapters are on it."""
        if self._known is None:
            self._known = knows(self.network)
        return self._known

    def reference_hidden(self, ids: Tensor, layout: Layout) -> Tensor:
        """`hidden` with the active adapter.

        Sequences are moved to start in the first column. With left padding some positions attend to nothing;
        cuDNN's attention gives these, and so all weights, nan gradients.
        """
        cells = layout.rows, layout.positions
        moved = ids.new_zeros(len(layout.lengths), layout.longest)
        moved[cells] = ids.flatten()[layout.source]
        mask = torch.zeros_like(moved, dtype=torch.bool)
        mask[cells] = True
        self.begin_pass()
        hidden = self.passes.hidden(moved, mask)  # (B, longest, D)
        return hidden[layout.rows[layout.read], layout.positions[layout.read]]

    def checkpoint_layers(self) -> None:
        """Gradient checkpointing on the reference path: each layer is recomputed in the backward pass."""
        for layer in decoder_layers(self.network):
            layer.forward = _checkpointed(layer.forward)

    # --- sharding ---

    @property
    def sharded(self) -> bool:
        """Whether its layers are sharded over processes."""
        return self.lockstep is not None

    def shard(self, mesh: DeviceMesh, lockstep: Lockstep) -> None:
        """Shard the layers over processes; adapters stay whole.

        From then on all processes must join every pass.
        """
        adapters: list[nn.Parameter] = []
        for name in self.peft.peft_config if self.peft else ():
            adapters += self.adapter_parameters(name)
        device = self.network.device if mesh.device_type == "cpu" else torch.device(mesh.device_type)
        shard_network(self.network, self.passes.trunk, mesh, adapters)
        for tensor in (*self.network.parameters(), *self.network.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)
        self.lockstep = lockstep

    def begin_pass(self) -> None:
        if self.lockstep is not None:
            self.lockstep.begin(self, self._active)

    def dummy_pass(self, adapter: str | None, backward: bool) -> None:
        """A pass of one token that changes nothing, so that other processes can run theirs."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with self.using(adapter):
            hidden = self.passes.hidden(ids, ids == 0)
            if backward:
                (0 * hidden.sum()).backward()


def _groups(layer: BaseTunerLayer | AuxiliaryTrainingWrapper) -> list[Mapping[str, nn.Module | nn.Parameter]]:
    """The parts of a layer that belong to adapters, each a mapping by adapter name."""
    return [attrgetter(name)(layer) for name in layer.adapter_layer_names]


def _checkpointed(forward: Callable[..., Result]) -> Callable[..., Result]:
    recompute = partial(checkpoint, forward, use_reentrant=False)

    def call(*args: Any, **kwargs: Any) -> Result:
        return recompute(*args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    return call
