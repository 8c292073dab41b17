"""NF4, the 4-bit format of QLoRA (Dettmers et al., 2023), in the bytes of bitsandbytes.

A weight is one of 16 values times the largest absolute value (absmax) of its block of 64 weights. Two codes
share a byte, the first in its high half. With double quantisation an absmax is itself one of 256 values times
the absmax of 256 blocks, plus one offset for the whole matrix.

`dequantize` multiplies in float32 and rounds once to the weight's dtype: whoever reads the codes and does the
same sees the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

BLOCK = 64
"""Weights that share an absmax."""
NESTED_BLOCK = 256
"""Blocks that share an absmax of the second level."""
NF4_BYTES = (4 + 8 / BLOCK + 32 / (BLOCK * NESTED_BLOCK)) / 8
"""Per weight, with double quantisation: code, scale, scale of scales."""
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What a code of 0 to 15 stands for: quantiles of the normal distribution."""
TINY = 1e-38
CHUNK = {"cpu": 2**18, "cuda": 2**22}
"""Weights that are quantised or dequantised at a time, by device, which bounds the temporary memory."""


@dataclass(frozen=True)
class NF4Weight:
    """One quantised matrix (or any tensor). Without double quantisation the nested fields are None."""

    codes: Tensor
    """uint8 (ceil(n / 2),): two weights per byte, in the order of the flattened tensor."""
    absmax: Tensor
    """(ceil(n / 64),): float32, or with double quantisation uint8 codes of `nested_map`."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """What the weight is rounded to."""
    nested_absmax: Tensor | None = None
    """float32 (ceil(blocks / 256),)."""
    nested_map: Tensor | None = None
    """float32 (256,): what the codes of `absmax` stand for."""
    offset: Tensor | None = None
    """float32 (): added to every absmax."""

    @classmethod
    def without_values(cls, shape: tuple[int, ...], dtype: torch.dtype, nested: bool) -> NF4Weight:
        """One on the meta device."""
        count = torch.Size(shape).numel()
        blocks = -(-count // BLOCK)

        def of(size: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=kind, device="meta")

        codes = of(-(-count // 2), torch.uint8)
        if not nested:
            return cls(codes, of(blocks), shape, dtype)
        scales = of(blocks, torch.uint8), shape, dtype, of(-(-blocks // NESTED_BLOCK)), of(256)
        return cls(codes, *scales, torch.empty((), device="meta"))

    @property
    def nested(self) -> bool:
        return self.nested_absmax is not None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by field."""
        fields = ("codes", "absmax", "nested_absmax", "nested_map", "offset")
        return {name: value for name in fields if (value := getattr(self, name)) is not None}

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def to(self, device: torch.device | str) -> NF4Weight:
        """The same bytes on another device; no dtype ever changes."""
        moved = {name: value.to(device) for name, value in self.tensors.items()}
        return replace(self, **moved)  # type: ignore[arg-type]  # only tensors


def _chunk(device: torch.device) -> int:
    return CHUNK.get(device.type, CHUNK["cpu"])


@cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two values of every byte, as the 8 bytes of one integer, (256,): a CPU looks a single element up
    about ten times faster than a row of two."""
    values = _values(device)
    return torch.stack((values.repeat_interleave(16), values.repeat(16)), -1).view(torch.int64).flatten()


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """The 256 values of bitsandbytes' signed dynamic 8-bit type, ascending: for each power of ten from 1e-6
    to 1 twice as many values between 0.1 and 1 of it as for the one before; and 0 and 1."""
    found = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        found += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


def _quantize_blocks(flat: Tensor, block: int, values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (n,) and absmax (ceil(n / block),) of a flat float32 tensor: the nearest value each, of two
    equally near the lower one. A short last block is divided by its absmax, the others are multiplied by its
    reciprocal, as bitsandbytes does."""
    full = flat.numel() // block * block
    blocks, rest = flat[:full].view(-1, block), flat[full:]
    absmax = blocks.abs().amax(-1)
    scaled = (blocks * (1.0 / absmax.clamp(min=TINY)).unsqueeze(-1)).flatten()
    if rest.numel():
        last = rest.abs().amax().clamp(min=TINY)
        absmax, scaled = torch.cat([absmax, last.view(1)]), torch.cat([scaled, rest / last])
    between = (values[:-1] + values[1:]) / 2
    if len(values) > len(VALUES):
        return torch.bucketize(scaled, between, out_int32=True).to(torch.uint8), absmax
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for bound in between.tolist():  # a few comparisons of all weights are faster than a search for each
        codes += scaled > bound
    return codes, absmax


@torch.no_grad()
def quantize(weight: Tensor, nested: bool = True) -> NF4Weight:
    """A float tensor in NF4, on its own device. `nested`: with double quantisation."""
    if not weight.is_floating_point():
        raise ValueError(f"only floating-point weights can be quantised, got {weight.dtype}")
    values, flat = _values(weight.device), weight.detach().reshape(-1)
    # what stays is allocated first, so that the memory of what does not is used again
    packed = torch.empty(-(-flat.numel() // 2), dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(-(-flat.numel() // BLOCK), dtype=torch.float32, device=weight.device)
    chunk = _chunk(weight.device)
    parts = zip(packed.split(chunk // 2), absmax.split(chunk // BLOCK), strict=True)
    for part, (bytes_, scales) in zip(flat.split(chunk), parts, strict=True):
        codes, scales[:] = _quantize_blocks(part.float(), BLOCK, values)
        codes = torch.nn.functional.pad(codes, (0, codes.numel() % 2), value=VALUES.index(0.0))
        bytes_[:] = codes[::2] << 4 | codes[1::2]
    made = NF4Weight(packed, absmax, tuple(weight.shape), weight.dtype)
    return nest(made, absmax.mean()) if nested else made


def nest(weight: NF4Weight, offset: Tensor) -> NF4Weight:
    """Double quantisation of a weight that has none: of its absmax minus the offset, which is their mean."""
    values = dynamic_map(weight.device)
    codes, absmax = _quantize_blocks(weight.absmax - offset, NESTED_BLOCK, values)
    return replace(weight, absmax=codes, nested_absmax=absmax, nested_map=values, offset=offset)


def absmax_of(weight: NF4Weight) -> Tensor:
    """The absmax of every block, float32 (ceil(n / 64),)."""
    if weight.nested_absmax is None or weight.nested_map is None or weight.offset is None:
        return weight.absmax
    values = weight.nested_map.index_select(0, weight.absmax.int())
    scale = weight.nested_absmax.repeat_interleave(NESTED_BLOCK)[: values.numel()]
    return values * scale + weight.offset


@torch.no_grad()
def dequantize(weight: NF4Weight) -> Tensor:
    """The weight in its shape and dtype: value times absmax in float32, rounded once."""
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    pairs = _pairs(weight.device)
    absmax = absmax_of(weight)
    chunk = _chunk(weight.device)
    parts = zip(weight.codes.split(chunk // 2), absmax.split(chunk // BLOCK), strict=True)
    for part, (codes, scale) in zip(out.view(-1).split(chunk), parts, strict=True):
        values = pairs.index_select(0, codes.int()).view(torch.float32)[: part.numel()]
        full = values.numel() // BLOCK * BLOCK
        values[:full].view(-1, BLOCK).mul_(scale[: full // BLOCK].unsqueeze(-1))
        values[full:].mul_(scale[full // BLOCK :])
        part.copy_(values)
    return out
