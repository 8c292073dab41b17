"""Matrix products with a LoRA adapter folded in. In: inputs (N, in). Out: outputs (N, out) and, backward, adapter gradients.

Written out, y = x W' + s (x A') B' reads and writes y twice. Here A x is appended to x and s B to W, so that one product does
both, and the backward product of the inputs yields the adapter's inner gradient for free. Only the adapter is ever trained.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class Lora(NamedTuple):
    """One adapter's live parameters on the members of a projection (all float32); a member without one has rank 0."""

    down: tuple[Tensor, ...]  # (r, in) each
    up: tuple[Tensor, ...]  # (out, r) each
    scales: tuple[float, ...]
    sinks: tuple[Tensor, ...] = ()  # where gradients are added up, downs then ups; empty = autograd collects them


class Projection(NamedTuple):
    """Linear maps of one input: in one tensor with room for an adapter, or one each where they are trained themselves."""

    weights: tuple[Tensor, ...]  # one (sum out, in + room), or (out, in) each
    biases: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]  # outputs of each member
    inputs: int
    down: Tensor | None  # (room, in), the loaded adapter's A in the base's type; None where there is no room
    uniform: bool = True  # every adapter here has the same ranks, so none leaves anything behind in another's place

    @property
    def room(self) -> int:
        """Inner size left for an adapter."""
        return 0 if self.down is None else len(self.down)


def windows(p: Projection, lora: Lora) -> list[tuple[Tensor, Tensor, float]]:
    """Each of an adapter's matrices, the window of the projection that takes it, and the factor it takes it with."""
    if p.down is None:
        return []
    found, row, rank = [], 0, 0
    for down, up, scale in zip(lora.down, lora.up, lora.scales, strict=True):
        rows, inner = up.shape
        if inner:
            found.append((down, p.down[rank : rank + inner], 1.0))
            found.append((up, p.weights[0][row : row + rows, p.inputs + rank : p.inputs + rank + inner], scale))
        row, rank = row + rows, rank + inner
    return found


@torch.no_grad()
def load_lora(p: Projection, lora: Lora | None) -> None:
    """Put an adapter's weights, as they are now, where the products read them; None = no adapter."""
    if p.down is None:
        return
    if lora is None or not p.uniform:
        p.weights[0][:, p.inputs :].zero_()
    if lora is not None:
        for source, window, scale in windows(p, lora):
            torch.mul(source, scale, out=window)


def product(x: Tensor, p: Projection, lora: Lora | None) -> Tensor:
    """(N, in), or (N, in + room) with anything in the last columns -> (N, sum out). The adapter must be loaded.

    Args:
        lora: its parameters, for gradients; None = no gradients are wanted.
    """
    if p.down is None:
        parts = [linear(x, weight, bias) for weight, bias in zip(p.weights, p.biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    if lora is not None and torch.is_grad_enabled():
        return _LoraProduct.apply(x, p, lora, *lora.down, *lora.up)
    return _forward(x, p)[0]


def _forward(x: Tensor, p: Projection) -> tuple[Tensor, Tensor]:
    """Outputs (N, sum out), and the adapter's inner values (N, room)."""
    weight, bias, down = p.weights[0], p.biases[0], p.down
    assert down is not None
    if x.shape[1] > p.inputs:  # there is room beside the inputs: one product does both
        inner = x.data[:, p.inputs :]
        torch.mm(x.data[:, : p.inputs], down.t(), out=inner)
        return linear(x.data, weight, bias), inner
    inner = torch.mm(x, down.t())
    y = linear(x, weight[:, : p.inputs], bias)
    return y.addmm_(inner, weight[:, p.inputs :].t()), inner


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Projection, lora: Lora, *_parameters: Tensor) -> Tensor:
        y, inner = _forward(x, p)
        ctx.p, ctx.lora, ctx.beside = p, lora, x.shape[1] > p.inputs
        ctx.save_for_backward(x.data, inner)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,), p, lora = gradients, ctx.p, ctx.lora
        x, inner = ctx.saved_tensors
        dy = dy.contiguous()
        dx = None
        if not ctx.needs_input_grad[0]:
            d_inner = torch.mm(dy, p.weights[0][:, p.inputs :])
        elif ctx.beside:
            dx = torch.mm(dy, p.weights[0])  # (N, in + room)
            d_inner = dx[:, p.inputs :]
            dx[:, : p.inputs].addmm_(d_inner, p.down)
        else:
            d_inner = torch.mm(dy, p.weights[0][:, p.inputs :])
            dx = torch.mm(dy, p.weights[0][:, : p.inputs]).addmm_(d_inner, p.down)
        d_up, d_down = torch.mm(dy.t(), inner), torch.mm(d_inner.t(), x[:, : p.inputs])
        downs, ups, row, rank = [], [], 0, 0
        for up in lora.up:
            rows, size = up.shape
            downs.append(d_down[rank : rank + size])
            ups.append(d_up[row : row + rows, rank : rank + size])
            row, rank = row + rows, rank + size
        if lora.sinks:
            for sink, gradient, scale in zip(lora.sinks, downs + ups, (1.0,) * len(downs) + lora.scales, strict=True):
                sink.add_(gradient, alpha=scale)
            return dx, None, None, *[None] * len(lora.sinks)
        scaled = [scale * part.float() for scale, part in zip(lora.scales, ups, strict=True)]
        return dx, None, None, *(part.float() for part in downs), *scaled
