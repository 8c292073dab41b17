"""`MergedDecoder`: a decoder for sampling, with its adapter merged into the weights.

For narrow networks on a CPU, where arithmetic takes the time: the products of an adapter of rank 16 are a
third of those of a layer of width 128. Merged in float32, what is sampled differs by rounding alone.
"""

from __future__ import annotations

import torch

from proxima.runtime.engine.decoder import Decoder
from proxima.runtime.engine.layer_weights import Block
from proxima.runtime.engine.lora_products import Projection

WORTH = 8  # a second copy of the layers' weights is made where adapters are at least 1/8 of their inputs


def merges(decoder: Decoder) -> bool:
    """Whether sampling by merged weights saves enough, and loses nothing: on a CPU, without codes or
    experts, in full precision."""
    weight = decoder.weight
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.float64):
        return False
    return all(
        block.experts is None
        and WORTH * block.qkv.padding >= block.qkv.inputs
        and all(part.quantized is None for part in block.projections)
        for block in decoder.blocks
    )


class MergedDecoder(Decoder):
    """Another decoder's weights with its adapter, merged again at every load."""

    def __init__(self, decoder: Decoder):
        self.__dict__.update(vars(decoder))
        self.live = decoder
        self.blocks = [_merged(block) for block in decoder.blocks]

    @torch.no_grad()
    def load(self, adapter: str | None) -> None:
        self.live.load(adapter)
        for block, live in zip(self.blocks, self.live.blocks, strict=True):
            for merged, part in zip(block.projections, live.projections, strict=True):
                if part.down is not None:
                    base = part.read()[:, : part.inputs]
                    torch.addmm(base, part.up, part.down, out=merged.weights[0])


def _merged(block: Block) -> Block:
    qkv, out, up, down = (_without_padding(part) for part in block.projections)
    return block._replace(qkv=qkv, out=out, up=up, down=down)


def _without_padding(part: Projection) -> Projection:
    """A projection of the same sizes whose weight is written when an adapter is loaded."""
    if part.down is None:
        return part
    return part._replace(weights=(part.read().new_empty(sum(part.sizes), part.inputs),), down=None)
