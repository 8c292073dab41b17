"""Matrix products with a LoRA adapter folded in: (N, in) -> (N, out), and the adapter's gradients.

Computed as y = x W' + s (x A') B', y is read and written twice. Here A x is appended to x and s B to W, so
that one product does both, and the backward product for the inputs also yields the gradient of the adapter's
inner values. Only the adapter is trained. A quantised weight is decoded before each product, in backward
passes too, and nothing keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from proxima.runtime.engine.quantized_weights import QuantizedWeight


class Lora(NamedTuple):
    """One adapter's live parameters on the modules of a projection (all float32); a module without one has
    rank 0."""

    down: tuple[Tensor, ...]  # (r, in) each
    up: tuple[Tensor, ...]  # (out, r) each
    scales: tuple[float, ...]
    sinks: tuple[Tensor, ...] = ()
    """(padding, in) and (sum out, padding), to which gradients are added; empty = autograd does it."""
    dropout: float = 0.0
    """Rate of dropout on the adapter's inputs, with gradients on; the layers of a projection share a mask."""


class Projection(NamedTuple):
    """Linear layers of one input: fused into one tensor with padding for an adapter, or separate where they
    are themselves trained."""

    weights: tuple[Tensor, ...]  # one (sum out, in + padding), or (out, in) each; none where quantised
    biases: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]  # outputs of each layer
    inputs: int
    down: Tensor | None  # (padding, in), the loaded adapter's A in the base's dtype; None without padding
    uniform: bool = True
    """Every adapter here has the same ranks, so that loading one overwrites all of another."""
    quantized: QuantizedWeight | None = None

    @property
    def padding(self) -> int:
        """Inner size left for an adapter."""
        return 0 if self.down is None else len(self.down)

    @property
    def up(self) -> Tensor:
        """(sum out, padding), the loaded adapter's B times its scale."""
        return self.weights[0][:, self.inputs :] if self.quantized is None else self.quantized.up

    def read(self) -> Tensor:
        """(sum out, in + padding): the fused weight and the loaded adapter; a quantised one until the next
        one is read."""
        return self.weights[0] if self.quantized is None else self.quantized.fill()


NO_LORA = Lora((), (), ())
NO_PROJECTION = Projection((), (), (), 0, None)


def adapter_views(lora: Lora, down: Tensor, up: Tensor) -> list[tuple[Tensor, Tensor, float]]:
    """Each of an adapter's matrices, its view in the matrices of the whole projection, (padding, in) and
    (sum out, padding), and its scale there."""
    found = []
    row = rank = 0
    for one_down, one_up, scale in zip(lora.down, lora.up, lora.scales, strict=True):
        rows, inner = one_up.shape
        if inner:
            found.append((one_down, down[rank : rank + inner], 1.0))
            found.append((one_up, up[row : row + rows, rank : rank + inner], scale))
        row += rows
        rank += inner
    return found


def batched_copy(copies: list[tuple[Tensor, Tensor, float]]) -> Callable[[], None]:
    """A function that copies each source, times its factor, to its target; in one launch where Triton is
    installed."""
    if not copies:
        return lambda: None
    try:
        from proxima.runtime.engine.kernels import Copies
    except ImportError:
        return lambda: _copy(copies)
    return Copies(copies)


@torch.no_grad()
def _copy(copies: list[tuple[Tensor, Tensor, float]]) -> None:
    for source, target, factor in copies:
        torch.mul(source, factor, out=target)


@torch.no_grad()
def load_lora(p: Projection, lora: Lora | None) -> None:
    """Copy an adapter's current weights to where the products read them; None = no adapter."""
    if p.down is None:
        return
    if lora is None or not p.uniform:
        p.up.zero_()
    if lora is not None:
        _copy(adapter_views(lora, p.down, p.up))


class Gate(NamedTuple):
    """A gated activation, fused with the product that follows it."""

    forward: Callable[[Tensor, int], Tensor]  # (N, 2 in), padding -> (N, in + padding), the last ones unset
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(N, 2 in), and the output's gradient as d + d_inner @ down -> the output of `forward`, and the gradient
    of its input."""


def product(x: Tensor, p: Projection, lora: Lora | None, gate: Gate | None = None) -> Tensor:
    """(N, in), or (N, in + padding) with any values in the last columns -> (N, sum out). The adapter must be
    loaded.

    Args:
        lora: its parameters, for gradients; None = no adapter here.
        gate: applied to x, which is (N, 2 in) then.
    """
    if p.down is None:
        parts = [linear(x, weight, bias) for weight, bias in zip(p.weights, p.biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    if torch.is_grad_enabled():
        lora = lora or NO_LORA
        return _LoraProduct.apply(x, p, lora, gate, *lora.down, *lora.up)
    return _forward(gate.forward(x, p.padding) if gate else x, p)[0]


def _forward(x: Tensor, p: Projection) -> tuple[Tensor, Tensor]:
    """Outputs (N, sum out), and the adapter's inner values (N, padding)."""
    weight = p.read()
    bias = p.biases[0]
    down = p.down
    assert down is not None
    if x.shape[1] > p.inputs:  # the padding follows the inputs: one product does both
        inner = x.data[:, p.inputs :]
        torch.mm(x.data[:, : p.inputs], down.t(), out=inner)
        return linear(x.data, weight, bias), inner
    inner = torch.mm(x, down.t())
    y = linear(x, weight[:, : p.inputs], bias)
    return y.addmm_(inner, weight[:, p.inputs :].t()), inner


def _forward_with_dropout(x: Tensor, p: Projection, rate: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same of (N, in), and which of the inputs the adapter sees (N, in)."""
    weight, down = p.read(), p.down
    assert down is not None
    seen, mask = torch.native_dropout(x, rate, True)
    inner = torch.mm(seen, down.t())
    y = linear(x, weight[:, : p.inputs], p.biases[0])
    return y.addmm_(inner, weight[:, p.inputs :].t()), inner, mask


def _backward_with_dropout(
    ctx: Any, x: Tensor, mask: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The adapter's inputs (N, in), the gradient of the product's input, and that of the adapter's inner
    values."""
    p, scale = ctx.p, 1 / (1 - ctx.lora.dropout)
    d_inner = torch.mm(dy, p.up)
    dx = None
    if ctx.gate or ctx.needs_input_grad[0]:
        dx = torch.mm(dy, p.read()[:, : p.inputs])
        dx += torch.ops.aten.native_dropout_backward(torch.mm(d_inner, p.down), mask, scale)
    if ctx.gate:
        x, dx = ctx.gate.backward(x, dx, torch.zeros_like(d_inner), p.down)
    elif dx is not None and ctx.is_padded:
        dx = torch.nn.functional.pad(dx, (0, p.padding))
    return torch.ops.aten.native_dropout_backward(x[:, : p.inputs], mask, scale), dx, d_inner


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: Projection, lora: Lora, gate: Gate | None, *_parameters: Tensor
    ) -> Tensor:
        ctx.p, ctx.lora, ctx.gate = p, lora, gate
        ctx.is_padded = gate is None and x.shape[1] > p.inputs
        given = gate.forward(x, p.padding) if gate else x
        if lora.dropout:
            y, inner, mask = _forward_with_dropout(given.data[:, : p.inputs], p, lora.dropout)
            ctx.save_for_backward(x.data, inner, mask)
            return y
        y, inner = _forward(given, p)
        if lora.up or gate:  # the gate's output is computed again: a view of it would keep it
            ctx.save_for_backward(x.data, inner.clone() if gate else inner)
        else:
            ctx.save_for_backward(x.new_empty(0), x.new_empty(0))  # neither is read
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,), p, lora = gradients, ctx.p, ctx.lora
        x, inner, *mask = ctx.saved_tensors
        dy = dy.contiguous()
        dx = None
        if mask:
            x, dx, d_inner = _backward_with_dropout(ctx, x, mask[0], dy)
        elif ctx.is_padded and ctx.needs_input_grad[0]:
            dx = torch.mm(dy, p.read())  # (N, in + padding)
            d_inner = dx[:, p.inputs :]
            dx[:, : p.inputs].addmm_(d_inner, p.down)
        elif ctx.gate:
            d_gated = torch.mm(dy, p.read())  # (N, in + padding)
            d_inner = d_gated[:, p.inputs :]
            x, dx = ctx.gate.backward(x, d_gated[:, : p.inputs], d_inner, p.down)
        else:
            d_inner = torch.mm(dy, p.up)
            if ctx.needs_input_grad[0]:
                dx = torch.mm(dy, p.read()[:, : p.inputs]).addmm_(d_inner, p.down)
        if not lora.up:
            return dx, None, None, None
        if lora.sinks:
            _add_product(lora.sinks[0], d_inner.t(), x[:, : p.inputs])
            _add_product(lora.sinks[1], dy.t(), inner)
            return dx, None, None, None, *[None] * (2 * len(lora.up))
        d_down, d_up = torch.mm(d_inner.t(), x[:, : p.inputs]), torch.mm(dy.t(), inner)
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        row = rank = 0
        for up, scale in zip(lora.up, lora.scales, strict=True):
            rows, size = up.shape
            downs.append(d_down[rank : rank + size].float())
            ups.append(scale * d_up[row : row + rows, rank : rank + size].float())
            row += rows
            rank += size
        return dx, None, None, None, *downs, *ups


def _add_product(sink: Tensor, left: Tensor, right: Tensor) -> None:
    """sink += left @ right, in the sink's dtype."""
    if ADDMM_TAKES_OUT_DTYPE:
        torch.addmm(sink, left, right, out_dtype=sink.dtype, out=sink)
    else:
        sink.add_(torch.mm(left, right))


ADDMM_TAKES_OUT_DTYPE = "dtype_out" in torch.ops.aten.addmm.overloads()
"""Whether products of half-precision matrices can be added to a float32 one."""
