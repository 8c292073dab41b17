"""`FewRowsDecoder`: one decode step of a gated, rotary decoder in seven kernels per layer.

In: one token per sequence and the caches. Out: normalised last hidden states. `Decoder.run` computes the same
with products made for many tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxima.core.errors import first_line
from proxima.runtime.engine.layer_weights import kinds_of
from proxima.runtime.engine.lora_products import Projection

if TYPE_CHECKING:
    from proxima.runtime.engine.decoder import Decoder
    from proxima.runtime.engine.generation_slots import Outputs, Slots
    from proxima.runtime.engine.kernels import Parts

log = logging.getLogger(__name__)


class FewRowsDecoder:
    """Reads the adapter that is loaded. Made for one set of slots."""

    def __init__(self, decoder: Decoder, slots: Slots):
        from proxima.runtime.engine.kernels import CacheAttention

        shape = decoder.shape
        self.decoder = decoder
        self.slots = slots
        device, architecture = slots.tokens.device, decoder.architecture
        self.attend = CacheAttention(slots.count, slots.size, shape.kv_heads, shape.head_size, device)
        positions = torch.arange(slots.size, device=device)
        cos, sin = architecture.angles("", decoder.weight, positions)  # the same for all layers
        assert cos is not None
        assert sin is not None
        self.angles = cos.contiguous(), sin.contiguous()  # of every position

    def __call__(self, count: int) -> Tensor:
        """Hidden states (n, D) after the last token of each of the first `count` slots; the token's keys and
        values are added to the cache."""
        from proxima.runtime.engine.kernels import add_norm_down

        decoder = self.decoder
        slots = self.slots
        eps = self.decoder.shape.eps
        blocks, lengths = decoder.blocks, slots.lengths[:count]
        x, normed = self._first_norm(count)
        for number, block in enumerate(blocks):
            qkv = _of_padded(normed, block.qkv)
            caches = slots.keys[number][:count], slots.values[number][:count]
            norms = (block.q_norm, block.k_norm)
            attended = self.attend(qkv, norms, *self.angles, *caches, lengths, decoder.shape.scale, eps)
            x, normed = add_norm_down(
                x, _folded(attended, block.out), block.mlp_norm.weight, eps, block.up.down
            )
            change = _folded(_of_padded(normed, block.up, gated=True), block.down)
            if number + 1 == len(blocks):
                return add_norm_down(x, change, decoder.architecture.last_norm.weight, eps, None)[1]
            after = blocks[number + 1]
            x, normed = add_norm_down(x, change, after.norm.weight, eps, after.qkv.down)
        raise AssertionError("a decoder has layers")

    def _first_norm(self, count: int) -> tuple[Tensor, Tensor]:
        """The residual stream that the first layer adds to, and its norm."""
        from proxima.runtime.engine.kernels import add_norm_down

        block, table = self.decoder.blocks[0], self.decoder.architecture.embedding_table
        assert table is not None
        given = (block.norm.weight, self.decoder.shape.eps, block.qkv.down)
        return add_norm_down(table, None, *given, self.slots.tokens[:count])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (n, V); the number of rows does not change a row's."""
        from proxima.runtime.engine.kernels import few_rows_product

        head = self.decoder.architecture.network.get_output_embeddings()
        return few_rows_product(hidden, head.weight, head.bias)

    @staticmethod
    def sample(logits: Tensor, lanes: Tensor, columns: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Tokens (n,) and their log-probabilities, as `generation.pick` draws them without a kept set."""
        from proxima.runtime.engine.kernels import sample

        return sample(logits, lanes, columns, temperature)

    def sample_and_advance(self, states: Tensor, outputs: Outputs, temperature: float, limit: int) -> None:
        """Sample the next tokens of the first slots from their hidden states (n, D), and write them to the
        outputs and the slots; without kept sets.

        Args:
            limit: most tokens of a response.
        """
        from proxima.runtime.engine.kernels import advance

        count, slots = len(states), self.slots
        drawn = self.sample(self.logits(states), slots.lanes[:count], slots.columns[:count], temperature)
        advance(drawn, slots, outputs, limit)

    def kernels(self, count: int) -> list[Callable[[], object]]:
        """Calls of each kernel on its own, with the shapes of a step; the caches must not be in use."""
        from proxima.runtime.engine.kernels import add_norm_down

        decoder = self.decoder
        slots = self.slots
        weight = self.decoder.weight
        block = self.decoder.blocks[0]
        shape, norms = decoder.shape, (block.q_norm, block.k_norm)
        x = weight.new_zeros(count, len(weight))
        caches = slots.keys[0][:count], slots.values[0][:count], slots.lengths[:count]

        def given(width: int) -> Tensor:
            return weight.new_zeros(count, width)

        qkv, out, up, down = (kinds_of(decoder.blocks, place) for place in range(4))

        def add(one: Projection, *after: Tensor | None) -> None:
            change = _folded(given(one.inputs), one)
            for matrix in after:
                add_norm_down(x, change, weight, shape.eps, matrix)

        return [
            lambda: self.attend(
                given(sum(block.qkv.sizes)), norms, *self.angles, *caches, shape.scale, shape.eps
            ),
            lambda: self.sample(self.logits(x), slots.lanes[:count], slots.columns[:count], 1.0),
            *(partial(_of_padded, given(one.inputs + one.padding), one) for one in qkv),
            *(partial(_of_padded, given(one.inputs + one.padding), one, gated=True) for one in up),
            *(partial(add, one, block.up.down) for one in out),
            *(partial(add, one, block.qkv.down, None) for one in down),
            lambda: self._first_norm(count),
        ]


def _of_padded(x: Tensor, p: Projection, gated: bool = False) -> Tensor:
    """The product of inputs that are followed by the adapter's inner values."""
    from proxima.runtime.engine.kernels import few_rows_product, nf4_product

    if p.quantized is not None:
        return nf4_product(x, p.quantized, p.biases[0], gated=gated)
    return few_rows_product(x, p.weights[0], p.biases[0], gated=gated)


def _folded(x: Tensor, p: Projection) -> Tensor | Parts:
    """The product that `add_norm_down` adds."""
    from proxima.runtime.engine.kernels import few_rows_parts, nf4_parts

    if p.quantized is not None:
        return nf4_parts(x, p.quantized, p.biases[0], p.down)
    return few_rows_parts(x, p.weights[0], p.biases[0], p.down)


def supports_few_rows(decoder: Decoder) -> bool:
    """Whether the kernels compute this decoder: like Llama, in half precision, frozen."""
    try:
        from proxima.runtime.engine.kernels import fits
    except ImportError:
        return False
    shape = decoder.shape
    plain = decoder.suits_kernels and decoder.half and not decoder.trained
    packed = [
        part.quantized for block in decoder.blocks for part in block.projections if part.quantized is not None
    ]
    return (
        plain
        and fits(shape.heads, shape.kv_heads, shape.head_size)
        and all(weight.suits_kernels for weight in packed)
    )


def few_rows_decoder(decoder: Decoder, slots: Slots) -> FewRowsDecoder | None:
    """One for these slots, where the kernels support the decoder and run here."""
    if not (slots.tokens.is_cuda and supports_few_rows(decoder)):
        return None
    from proxima.runtime.engine.kernels import run_together

    try:
        made = FewRowsDecoder(decoder, slots)
        run_together(made.kernels(slots.count), slots.tokens.device)
    except Exception as error:  # whatever Triton cannot compile or launch here
        log.warning("decode steps without their kernels, sampling is slower: %s", first_line(error))
        return None
    return made
