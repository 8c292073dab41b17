"""`Linear4bit`: a frozen linear layer whose weight is NF4 codes (`core/nf4.py`).

PEFT adapts it like any `nn.Linear`. The dequantised weight lives for one product only: the backward pass
dequantises again instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from proxima.core.nf4 import NF4Weight, dequantize


class Linear4bit(nn.Linear):
    """`weight` is what `nn.Linear` has until `set_weight`; then the codes, uint8 (ceil(n / 2), 1)."""

    _nf4: NF4Weight | None = None

    @property
    def nf4(self) -> NF4Weight:
        """The quantised weight, on the layer's device."""
        if self._nf4 is None:
            raise RuntimeError("this layer has no quantised weight yet")
        return self._nf4

    def set_weight(self, weight: NF4Weight) -> None:
        if weight.shape != (self.out_features, self.in_features):
            raise ValueError(
                f"the quantised weight has shape {weight.shape}, where "
                f"{(self.out_features, self.in_features)} is needed"
            )
        self._nf4 = weight
        self.weight = nn.Parameter(weight.codes.unsqueeze(-1), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Scales move with the codes, but never change their dtype, as a buffer would in `.to(dtype)`."""
        super()._apply(fn, recurse)
        if self._nf4 is not None:
            codes = self.weight.detach().flatten()
            self._nf4 = replace(self._nf4.to(codes.device), codes=codes)
        return self

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self.bias, self.nf4)

    def dequantized(self, dtype: torch.dtype) -> nn.Linear:
        """The same layer with its weight in full."""
        made = nn.utils.skip_init(
            nn.Linear,
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            device=self.nf4.device,
            dtype=dtype,
        )
        with torch.no_grad():
            made.weight.copy_(dequantize(self.nf4))
            if self.bias is not None:
                made.bias.copy_(self.bias)
        return made.requires_grad_(False)


class _Context(FunctionCtx):
    weight: NF4Weight
    needs_input_grad: tuple[bool, ...]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, bias: Tensor | None, weight: NF4Weight) -> Tensor:
        ctx.weight = weight
        return nn.functional.linear(x, dequantize(weight), bias)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        to_x, to_bias, _ = ctx.needs_input_grad
        return (
            grad @ dequantize(ctx.weight) if to_x else None,
            grad.flatten(0, -2).sum(0) if to_bias else None,
            None,
        )


def is_quantized(network: nn.Module) -> bool:
    """Whether any of its layers is in 4 bits."""
    return any(isinstance(module, Linear4bit) for module in network.modules())


def dequantize_layers(network: nn.Module, dtype: torch.dtype) -> None:
    """Replace every 4-bit layer by one with its weight in full."""
    for name, module in list(network.named_modules()):
        if isinstance(module, Linear4bit):
            network.set_submodule(name, module.dequantized(dtype))
