"""`GraphedPass`: a forward pass and its backward pass as two CUDA graphs.

For small models the GPU waits for Python; a graph costs Python one call. Shapes are fixed: short batches are
filled up with padding tokens that are never read, so every product has the same shape at every call. A
sequence's hidden states are then the same bits whatever is batched with it, in scoring and in training alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from proxima.core.recorded_experts import unrecorded
from proxima.runtime.engine.layout import Layout, tile_table
from proxima.runtime.engine.pass_capacity import PassCapacity

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_forwards = [0]
"""Replays of any pass so far. Passes share memory: a backward pass must directly follow its forward."""

Pool: TypeAlias = "_POOL_HANDLE | None"
"""Handle of a CUDA graph's memory pool."""
Pass = Callable[[Tensor, Layout], Tensor]


class GradientBuffers(NamedTuple):
    """Where a backward pass leaves gradients."""

    of: dict[Tensor, Tensor]
    """The gradient buffer of each parameter."""
    sinks: list[Tensor]
    """Buffers of whole projections, to which the backward pass adds."""
    collect: Callable[[], None]
    """Copies from the sinks to the gradients."""


class GraphedPass:
    """One adapter's pass. A backward pass must directly follow its forward pass: they share memory."""

    def __init__(
        self,
        run: Pass,
        gradients: GradientBuffers,
        sizes: PassCapacity,
        device: torch.device,
        pool: Pool,
        recorded: Tensor | None = None,
    ):
        """
        Args:
            run: (ids (N,), layout) -> hidden states (M, D); it reads parameters in place, and its backward
                pass adds to the sinks.
            pool: memory shared with other passes, which never run at the same time.
            recorded: (N, L, K) where `run` reads the experts to be replayed.
        """
        self.sizes = sizes
        self.parameters = list(gradients.of)
        self.gradients = gradients
        self.device = device
        self._recorded = recorded
        # padding reads other tokens each time: the gradient of one that was read often takes long to add up
        reads = sizes.tokens - 1 - torch.arange(sizes.reads, device=device)
        self._padding = torch.cat([reads.new_zeros(2 * sizes.tokens), reads])
        self._inputs = self._padding.clone()
        self._source, self._positions, self._read = self._inputs.split(
            [sizes.tokens, sizes.tokens, sizes.reads]
        )
        self._bounds = torch.zeros(sizes.sequences + 1 + 3 * sizes.tiles, dtype=torch.int32, device=device)
        starts, tiles = self._bounds.split([sizes.sequences + 1, 3 * sizes.tiles])
        self._ids = torch.zeros(sizes.tokens, dtype=torch.long, device=device)
        self._layout = Layout(
            self._source,
            self._source,
            self._positions,
            starts,
            self._read,
            tiles.view(-1, 3),
            (sizes.longest,),
        )
        self._run = run  # keeps alive what the graphs read
        self._capture(run, pool)

    def _capture(self, run: Pass, pool: Pool) -> None:
        self._fill_sizes((self.sizes.longest,) * (self.sizes.tokens // self.sizes.longest))
        if not self.parameters:
            self._capture_forward(run, pool)
            return
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.enable_grad():
            for _ in range(2):
                out = run(self._ids, self._layout)
                torch.autograd.grad(out, self.parameters, torch.zeros_like(out), allow_unused=True)
                self.gradients.collect()
        torch.cuda.current_stream().wait_stream(side)
        del out
        torch.accelerator.empty_cache()  # the memory of warming up; graphs have their own
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.enable_grad():
            with torch.cuda.graph(self._forward, pool=pool):
                out = run(self._ids, self._layout)
            self._grad = torch.zeros_like(out)
            with torch.cuda.graph(self._backward, pool=self._forward.pool()):
                torch.autograd.grad(out, self.parameters, self._grad, allow_unused=True)
                self.gradients.collect()
        self._out = out.detach()
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    @torch.no_grad()
    def _capture_forward(self, run: Pass, pool: Pool) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(self._ids, self._layout)
        torch.cuda.current_stream().wait_stream(side)
        self._forward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, pool=pool):
            self._out = run(self._ids, self._layout)

    @property
    def pool(self) -> Pool:
        return self._forward.pool()

    def __call__(self, ids: Tensor, layout: Layout, experts: Tensor | None = None) -> Tensor:
        """Hidden states (M, D); with gradients on, the backward pass adds to the parameters' `grad`."""
        self._fill(ids, layout)
        if self._recorded is not None:
            self._recorded.fill_(unrecorded(self._recorded.dtype))
            if experts is not None:
                self._recorded[: layout.total] = experts
        if torch.is_grad_enabled() and self.parameters:
            return _Replayed.apply(self, len(layout.read), self._anchor())
        return self.forward(len(layout.read))

    def forward(self, reads: int) -> Tensor:
        self._forward.replay()
        _forwards[0] += 1
        return self._out[:reads].clone()

    def backward(self, gradient: Tensor, stamp: int) -> None:
        if stamp != _forwards[0]:
            raise RuntimeError("another forward pass came between this one and its backward")
        held = [parameter.grad is kept for parameter, kept in self.gradients.of.items()]
        if not all(held):
            if any(parameter.grad is not None for parameter in self.parameters):
                raise RuntimeError("gradients were replaced between two backward passes that add up")
            torch._foreach_zero_(self.gradients.sinks)
            for parameter, kept in self.gradients.of.items():
                parameter.grad = kept
        self._grad.zero_()
        self._grad[: len(gradient)] = gradient
        self._backward.replay()

    def _anchor(self) -> Tensor:
        return torch.zeros((), device=self.device, requires_grad=True)

    def _fill(self, ids: Tensor, layout: Layout) -> None:
        self._inputs.copy_(self._padding)
        self._source[: layout.total] = layout.source
        self._positions[: layout.total] = layout.positions
        self._read[: len(layout.read)] = layout.read
        torch.index_select(ids.flatten(), 0, self._source, out=self._ids)
        self._ids[layout.total :] = 0  # a pad id may lie outside the vocabulary
        self._fill_sizes(layout.lengths)

    def _fill_sizes(self, lengths: tuple[int, ...]) -> None:
        """Write where sequences start. The rest becomes sequences of padding tokens, then empty ones."""
        filled = self.sizes.filled(lengths)
        starts = np.full(self.sizes.sequences + 1, self.sizes.tokens, dtype=np.int32)
        starts[: len(filled)] = np.cumsum([0, *filled[:-1]])
        bounds = np.concatenate([starts, tile_table(filled, self.sizes.tiles).flatten()])
        self._bounds.copy_(torch.from_numpy(bounds).pin_memory(), non_blocking=True)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph: GraphedPass, reads: int, anchor: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.graph = graph
        out = graph.forward(reads)
        ctx.stamp = _forwards[0]
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[no-untyped-def]
        ctx.graph.backward(gradient, ctx.stamp)
        return None, None, None
