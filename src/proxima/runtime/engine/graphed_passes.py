"""`GraphedPasses`: a decoder's passes as CUDA graphs, one per adapter.

For adapters on half-precision weights on a GPU. Gradients are accumulated in sinks, one pair of matrices per
projection, and then copied to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxima.runtime.engine.cuda_graphs import GradientBuffers, GraphedPass, PassCapacity
from proxima.runtime.engine.layer_weights import Block, Loras
from proxima.runtime.engine.layout import Layout
from proxima.runtime.engine.lora_products import Lora, Projection, adapter_views, batched_copy

if TYPE_CHECKING:
    from proxima.runtime.engine.decoder import Decoder


class GraphedPasses:
    """Captures a pass at first use, without its backward pass until gradients are wanted, and again when a
    batch exceeds its capacity."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self._passes: dict[str | None, GraphedPass] = {}
        self._sizes = PassCapacity(0, 0, 0, 0)

    def __call__(self, ids: Tensor, layout: Layout, adapter: str | None) -> Tensor:
        """Hidden states (M, D) at the layout's `read` positions of padded ids (B, T)."""
        if not self._sizes.fits(layout):
            self._sizes = self._sizes.grow(layout)
            self._passes.clear()
        trains = torch.is_grad_enabled() and adapter is not None
        if adapter not in self._passes or (trains and not self._passes[adapter].parameters):
            self._passes.pop(adapter, None)  # frees its memory first
            self._passes[adapter] = self._capture(layout, adapter, trains)
        return self._passes[adapter](ids, layout)

    def _capture(self, layout: Layout, adapter: str | None, trains: bool) -> GraphedPass:
        decoder = self.decoder
        given = decoder.loras(adapter if trains else None)
        loras = [_loras_with_sinks(lora, block) for lora, block in zip(given, decoder.blocks, strict=True)]
        groups = [group for lora in loras for group in lora if group is not None]
        found = [window for group in groups for window in adapter_views(group, *group.sinks)]
        kept = {weight: torch.zeros_like(weight) for weight, _, _ in found}
        collect = batched_copy([(window, kept[weight], scale) for weight, window, scale in found])
        gradients = GradientBuffers(kept, [sink for group in groups for sink in group.sinks], collect)
        load = self._loader(adapter)

        def run(flat: Tensor, layout: Layout) -> Tensor:
            load()
            return decoder.run(flat, layout, loras, read=layout.read, functions=decoder.train_functions)

        pool = next(iter(self._passes.values())).pool if self._passes else None
        return GraphedPass(run, gradients, self._sizes, layout.read.device, pool)

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
                copies += adapter_views(group, part.down, part.weights[0][:, part.inputs :])
        return batched_copy(copies)


def _loras_with_sinks(loras: Loras, block: Block) -> Loras:
    pairs = zip(loras, block.projections, strict=True)
    return Loras(*(lora and _with_sinks(lora, projection) for lora, projection in pairs))


def _with_sinks(lora: Lora, p: Projection) -> Lora:
    sizes = (p.padding, p.inputs), (sum(p.sizes), p.padding)
    return lora._replace(sinks=tuple(torch.zeros(size, device=p.weights[0].device) for size in sizes))
