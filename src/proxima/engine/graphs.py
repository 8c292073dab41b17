"""`GraphedPass`: a forward pass and its backward as two CUDA graphs. In: ids laid end to end. Out: hidden states; gradients.

At this size a GPU waits for Python, not the other way round; a graph costs Python one call. Shapes are fixed: short batches are
filled up with tokens that nobody reads, so every product has the same shape at every call, and a sequence's hidden states are
the same bits whatever stands beside it, in scoring and in training alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from proxima.engine.layout import Layout

_forwards = [0]  # replays of any pass: they share memory, so a backward is only good right after its own forward

Pass = Callable[[Tensor, Layout], Tensor]


@dataclass(frozen=True)
class Sizes:
    """What a pass has room for."""

    tokens: int
    sequences: int
    longest: int
    reads: int

    def holds(self, layout: Layout) -> bool:
        return (
            layout.total <= self.tokens
            and len(layout.lengths) <= self.sequences
            and layout.longest <= self.longest
            and len(layout.read) <= self.reads
        )

    def grown(self, layout: Layout) -> Sizes:
        """Room for this layout too, in coarse steps."""
        fillers = -(-max(self.tokens, layout.total) // 128) + 1
        return Sizes(
            max(self.tokens, _up(layout.total, 256)),
            max(self.sequences, _up(len(layout.lengths), 8) + fillers),
            max(self.longest, _up(layout.longest, 128)),
            max(self.reads, _up(len(layout.read), 128)),
        )


class GraphedPass:
    """One adapter's pass. A backward must follow its own forward directly, for both use the same memory."""

    def __init__(
        self, run: Pass, parameters: list[nn.Parameter], gradients: list[Tensor], sizes: Sizes, device: torch.device, pool: Any
    ):
        """
        Args:
            run: (ids (N,), layout) -> hidden states (M, D); it reads `parameters` where they lie, and its backward adds to
                `gradients`.
            pool: memory shared with other passes; they never run at the same time.
        """
        self.sizes, self.parameters, self.gradients, self.device = sizes, parameters, gradients, device
        whole = torch.zeros(2 * sizes.tokens + sizes.sequences + 1 + sizes.reads, dtype=torch.long, device=device)
        self._inputs = whole
        parts = whole.split([sizes.tokens, sizes.tokens, sizes.sequences + 1, sizes.reads])
        self._source, self._positions, self._read = parts[0], parts[1], parts[3]
        self._starts = torch.zeros(sizes.sequences + 1, dtype=torch.int32, device=device)
        self._ids = torch.zeros(sizes.tokens, dtype=torch.long, device=device)
        self._layout = Layout(parts[0], parts[0], parts[1], self._starts, parts[3], (sizes.longest,))
        self._run = run  # what it holds must live as long as the graphs that read it
        self._capture(run, pool)

    def _capture(self, run: Pass, pool: Any) -> None:
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
        torch.cuda.current_stream().wait_stream(side)
        del out
        torch.cuda.empty_cache()  # what warming up took; the graphs have memory of their own
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.enable_grad():
            with torch.cuda.graph(self._forward, pool=pool):
                out = run(self._ids, self._layout)
            self._grad = torch.zeros_like(out)
            with torch.cuda.graph(self._backward, pool=self._forward.pool()):
                torch.autograd.grad(out, self.parameters, self._grad, allow_unused=True)
        self._out = out.detach()
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    @torch.no_grad()
    def _capture_forward(self, run: Pass, pool: Any) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(self._ids, self._layout)
        torch.cuda.current_stream().wait_stream(side)
        self._forward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, pool=pool):
            self._out = run(self._ids, self._layout)

    @property
    def pool(self) -> Any:
        return self._forward.pool()

    def __call__(self, ids: Tensor, layout: Layout) -> Tensor:
        """Hidden states (M, D); with gradients on, backward adds to the parameters' `grad`."""
        self._fill(ids, layout)
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
        if any(parameter.grad is None for parameter in self.parameters):
            torch._foreach_zero_(self.gradients)
        for parameter, kept in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = kept
        self._grad.zero_()
        self._grad[: len(gradient)] = gradient
        self._backward.replay()

    def _anchor(self) -> Tensor:
        return torch.zeros((), device=self.device, requires_grad=True)

    def _fill(self, ids: Tensor, layout: Layout) -> None:
        self._inputs.zero_()
        self._source[: layout.total] = layout.source
        self._positions[: layout.total] = layout.positions
        self._read[: len(layout.read)] = layout.read
        torch.index_select(ids.flatten(), 0, self._source, out=self._ids)
        self._ids[layout.total :] = 0  # a pad id may lie outside the vocabulary
        self._fill_sizes(layout.lengths)

    def _fill_sizes(self, lengths: tuple[int, ...]) -> None:
        """Where sequences begin; what is left over becomes sequences of tokens that nobody reads, then empty ones."""
        starts, left = [0], self.sizes.tokens - sum(lengths)
        for length in lengths:
            starts.append(starts[-1] + length)
        while left > 0:
            starts.append(starts[-1] + min(left, self.sizes.longest))
            left -= self.sizes.longest
        starts += [starts[-1]] * (self.sizes.sequences + 1 - len(starts))
        self._starts.copy_(torch.tensor(starts, dtype=torch.int32).pin_memory(), non_blocking=True)


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


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
