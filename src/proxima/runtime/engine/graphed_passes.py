"""`GraphedPasses`: a decoder's passes as CUDA graphs, one per adapter.

For adapters on half-precision weights on a GPU. Gradients are accumulated in sinks, one pair of matrices per
projection, and then copied to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from proxima.runtime.engine.cuda_graphs import GradientBuffers, GraphedPass
from proxima.runtime.engine.expert_record import new_expert_record
from proxima.runtime.engine.experts import Routing
from proxima.runtime.engine.layer_weights import Block, Loras
from proxima.runtime.engine.layout import Layout
from proxima.runtime.engine.lora_products import Lora, Projection, adapter_views, batched_copy
from proxima.runtime.engine.pass_capacity import PassCapacity

if TYPE_CHECKING:
    from proxima.runtime.engine.decoder import Decoder


SMALLEST = 1024  # tokens of the smallest capacity, where there are several
KEPT = 16  # capacities whose passes are kept; they share their memory


class PassKey(NamedTuple):
    """What a captured pass is for."""

    adapter: str | None
    dropout: float
    capacity: PassCapacity


class Capacities:
    """Which capacity a pass has, and which are kept."""

    def __init__(self) -> None:
        self._grown: dict[int, PassCapacity] = {}  # by size in tokens; 0 = if there is one size
        self.known: list[PassCapacity] = []
        """The last ones that were used, the newest last."""

    def of(self, layout: Layout, planned: PassCapacity | None = None, by_size: bool = False) -> PassCapacity:
        """The planned capacity, so that nothing follows from earlier batches; for a batch that was not
        planned one that grows with them.

        Args:
            by_size: several capacities, by the batch's size.
        """
        if planned is not None and planned.fits(layout):
            return self._keep(planned)
        size = max(SMALLEST, 1 << (layout.total - 1).bit_length()) if by_size else 0
        reads = size if len(layout.read) > len(layout.lengths) else 0  # one per sequence, or any number
        capacity = self._grown.get(size, PassCapacity(size, 0, 0, reads))
        if not capacity.fits(layout):
            self.known = [one for one in self.known if one is not capacity]
            capacity = self._grown[size] = capacity.grow(layout)
        return self._keep(capacity)

    def _keep(self, capacity: PassCapacity) -> PassCapacity:
        self.known = [*(one for one in self.known if one != capacity), capacity][-KEPT:]
        return capacity


class GraphedPasses:
    """Captures a pass at first use, without its backward pass until gradients are wanted, and again for every
    other capacity: the one that is planned, or what a batch needs that exceeds it."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self._passes: dict[PassKey, GraphedPass] = {}
        self._capacities = Capacities()
        self._buffers: dict[str, tuple[list[Loras], GradientBuffers]] = {}
        self.by_size = False
        """Passes of several capacities: quicker for batches of different sizes, but a sequence's bits then
        depend on the batch it is in."""
        self.planned: Callable[[], PassCapacity | None] = lambda: None
        """The capacity of all passes at present, where it is known."""

    def __call__(
        self,
        ids: Tensor,
        layout: Layout,
        adapter: str | None,
        dropout: float = 0.0,
        experts: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (M, D) at the layout's `read` positions of padded ids (B, T).

        Args:
            experts: (N, L, K) recorded ones, to be replayed.
        """
        capacity = self._capacities.of(layout, self.planned(), self.by_size)
        key = PassKey(adapter, dropout, capacity)
        trains = torch.is_grad_enabled() and adapter is not None
        if key not in self._passes or (trains and not self._passes[key].parameters):
            self._passes.pop(key, None)  # frees its memory first
            known = self._capacities.known
            self._passes = {key: one for key, one in self._passes.items() if key.capacity in known}
            self._passes[key] = self._capture(layout, key, trains)
        return self._passes[key](ids, layout, experts)

    def _capture(self, layout: Layout, key: PassKey, trains: bool) -> GraphedPass:
        decoder = self.decoder
        loras, gradients = decoder.loras(None), GradientBuffers({}, [], lambda: None)
        if trains and key.adapter is not None:
            if key.adapter not in self._buffers:
                self._buffers[key.adapter] = self._make_buffers(key.adapter)
            loras, gradients = self._buffers[key.adapter]
            loras = [lora.with_dropout(key.dropout) for lora in loras]
        load, size = self._loader(key.adapter), key.capacity
        record = new_expert_record(0, size.tokens, decoder, layout.read.device)
        recorded = None if record is None else record.experts[0]

        def run(flat: Tensor, layout: Layout) -> Tensor:
            load()
            given = (decoder.train_functions, Routing(recorded))
            return decoder.run(flat, layout, loras, None, layout.read, *given)

        pool = next(iter(self._passes.values())).pool if self._passes else None
        return GraphedPass(run, gradients, size, layout.read.device, pool, recorded)

    def _make_buffers(self, adapter: str) -> tuple[list[Loras], GradientBuffers]:
        """An adapter's parameters with sinks, and its gradients: the same for passes of all sizes."""
        decoder = self.decoder
        given = decoder.loras(adapter)
        loras = [_loras_with_sinks(lora, block) for lora, block in zip(given, decoder.blocks, strict=True)]
        groups = [group for lora in loras for group in lora if group is not None]
        found = [window for group in groups for window in adapter_views(group, *group.sinks)]
        kept = {weight: torch.zeros_like(weight) for weight, _, _ in found}
        collect = batched_copy([(window, kept[weight], scale) for weight, window, scale in found])
        return loras, GradientBuffers(kept, [sink for group in groups for sink in group.sinks], collect)

    def _loader(self, adapter: str | None) -> Callable[[], None]:
        """`Decoder.load` for a graph: all matrices in one launch, where Triton is installed."""
        decoder = self.decoder
        projections = [part for block in decoder.blocks for part in block.projections]
        groups = [group for loras in decoder.loras(adapter) for group in loras]
        if adapter is None or not all(groups) or not all(part.uniform for part in projections):
            return lambda: decoder.load(adapter)
        copies = []
        for part, group in zip(projections, groups, strict=True):
            if group is not None and part.down is not None:
                copies += adapter_views(group, part.down, part.up)
        return batched_copy(copies)


def _loras_with_sinks(loras: Loras, block: Block) -> Loras:
    pairs = zip(loras, block.projections, strict=True)
    return Loras(*(lora and _with_sinks(lora, projection) for lora, projection in pairs))


def _with_sinks(lora: Lora, p: Projection) -> Lora:
    sizes = (p.padding, p.inputs), (sum(p.sizes), p.padding)
    return lora._replace(sinks=tuple(torch.zeros(size, device=p.up.device) for size in sizes))
