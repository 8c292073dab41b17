"""`QuantizedWeight`: a projection's weight in NF4, with the loaded adapter's up projection beside it.

Products of many rows read it decoded. That copy lies in one `Scratch` which all layers share: it is filled
just before each product, also in backward passes, and nothing may keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from proxima.core.nf4 import BLOCK, NESTED_BLOCK, VALUES, NF4Weight, dequantize

ALIGNED = BLOCK * NESTED_BLOCK
"""Weights of one module are followed by padding up to a multiple of this, so that blocks of either level
belong to one module."""


class Scratch:
    """Memory for the largest decoded weight; it holds the one filled last."""

    def __init__(self, like: Tensor):
        self._flat = like.new_empty(0)

    def reserve(self, rows: int, columns: int) -> None:
        if rows * columns > len(self._flat):
            self._flat = self._flat.new_empty(rows * columns)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return self._flat[: rows * columns].view(rows, columns)

    def new_zeros(self, *shape: int) -> Tensor:
        """Of the dtype and device of what is decoded."""
        return self._flat.new_zeros(shape)


@dataclass(frozen=True)
class QuantizedWeight:
    """Matrices of one input, joined row by row; `parts` are views of the joined tensors."""

    parts: tuple[NF4Weight, ...]
    inputs: int
    codes: Tensor  # uint8, two weights per byte
    absmax: Tensor  # per block of 64: float32, or uint8 codes where they are quantised themselves
    nested: Tensor | None  # float32 per 256 blocks, and so are the offsets of their modules
    offsets: Tensor | None
    table: Tensor | None  # float32 (256,), what codes of absmax stand for
    starts: Tensor  # (sum out,) int32, the first block of each row
    up: Tensor  # (sum out, padding) in the run's dtype
    scratch: Scratch

    @property
    def is_nested(self) -> bool:
        return self.nested is not None

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """What a kernel decodes from."""
        unused = self.absmax
        nested = [unused if part is None else part for part in (self.nested, self.offsets, self.table)]
        return self.codes, self.absmax, *nested, _values(self.codes.device)

    @property
    def suits_kernels(self) -> bool:
        """Whether rows begin with a block."""
        return self.inputs % BLOCK == 0

    def fill(self) -> Tensor:
        """(sum out, in + padding): the decoded weight and the adapter, until the scratch is filled again."""
        rows, padding = self.up.shape
        out = self.scratch.matrix(rows, self.inputs + padding)
        if out.is_cuda and self.suits_kernels and _has_triton():
            from proxima.runtime.engine.kernels import fill

            fill(self, out)
        else:
            fill_plainly(self, out)
        return out


@torch.no_grad()
def fill_plainly(weight: QuantizedWeight, out: Tensor) -> None:
    """`QuantizedWeight.fill` by torch."""
    sizes = [part.shape[0] for part in weight.parts]
    for part, rows in zip(weight.parts, out[:, : weight.inputs].split(sizes), strict=True):
        rows.copy_(dequantize(part))
    out[:, weight.inputs :] = weight.up


def can_join(weights: Sequence[NF4Weight]) -> bool:
    """Whether one kernel decodes all of them: plain or nested alike, with the same values of the second
    level."""
    first = weights[0]
    return all(
        one.nested == first.nested
        and one.dtype == first.dtype
        and (one.nested_map is None or torch.equal(one.nested_map, first.nested_map))  # type: ignore[arg-type]
        for one in weights
    )


def join(weights: Sequence[NF4Weight], padding: int, scratch: Scratch) -> QuantizedWeight:
    """Matrices (out, in) of one input, joined; whoever gave them should hold the views in `parts` instead."""
    inputs, first = weights[0].shape[1], weights[0]
    sizes = [one.shape[0] * inputs for one in weights]
    padded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    blocks = [size // BLOCK for size in padded]
    codes, code_parts = _joined([one.codes for one in weights], [size // 2 for size in padded])
    absmax, absmax_parts = _joined([one.absmax for one in weights], blocks)
    parts = [
        replace(one, codes=code, absmax=scale)
        for one, code, scale in zip(weights, code_parts, absmax_parts, strict=True)
    ]
    nested, offsets = [], []  # one number each per `ALIGNED` weights
    for one in weights:
        if one.nested_absmax is not None and one.offset is not None:
            nested.append(one.nested_absmax)
            offsets.append(one.offset.expand(one.nested_absmax.shape))
    rows = sum(one.shape[0] for one in weights)
    scratch.reserve(rows, inputs + padding)
    return QuantizedWeight(
        parts=tuple(parts),
        inputs=inputs,
        codes=codes,
        absmax=absmax,
        nested=torch.cat(nested) if nested else None,
        offsets=torch.cat(offsets) if offsets else None,
        table=first.nested_map,
        starts=_starts(weights, blocks),
        up=scratch.new_zeros(rows, padding),
        scratch=scratch,
    )


def _joined(parts: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Tensors end to end, each with zeros up to its size, and the views that hold them."""
    whole = parts[0].new_zeros(sum(sizes))
    views = [
        window[: part.numel()].copy_(part.flatten())
        for window, part in zip(whole.split(sizes), parts, strict=True)
    ]
    return whole, views


def _starts(weights: Sequence[NF4Weight], blocks: Sequence[int]) -> Tensor:
    """(sum out,) int32: the first block of each row, where rows begin with one."""
    found, before = [], 0
    for one, count in zip(weights, blocks, strict=True):
        found.append(before + torch.arange(one.shape[0], dtype=torch.int32) * (one.shape[1] // BLOCK))
        before += count
    return torch.cat(found).to(weights[0].device)


@cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, device=device)


@cache
def _has_triton() -> bool:
    try:
        import proxima.runtime.engine.kernels.nf4_kernels  # noqa: F401
    except ImportError:
        return False
    return True
