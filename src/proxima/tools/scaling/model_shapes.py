"""Shapes of dense decoders.

In: a size's name. Out: widths and counts of weights. (Qwen3 up to 32B; 70B is Llama 3's.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What time and memory follow from."""

    hidden: int
    layers: int
    heads: int
    inner: int
    """Width inside the feed-forward part."""
    vocabulary: int = 151_936
    tied: bool = False
    """Output head and embeddings are one."""
    kv_heads: int = 8
    head_size: int = 128

    @property
    def layer_widths(self) -> int:
        """Inputs and outputs of the linear maps of a layer (queries, keys and values are one; so are gate
        and up)."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return (
            (self.hidden + queries + 2 * keys)
            + (queries + self.hidden)
            + (self.hidden + 2 * self.inner)
            + (self.inner + self.hidden)
        )

    @property
    def layer_weights(self) -> int:
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return self.hidden * (2 * queries + 2 * keys + 3 * self.inner)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        return self.layers * self.layer_weights + self.head_weights * (1 if self.tied else 2)

    def adapter_weights(self, rank: int) -> int:
        """Of one adapter on every linear map; queries, keys and values, gate and up have one each."""
        return self.layers * rank * (self.layer_widths + 3 * self.hidden)

    @property
    def cached(self) -> int:
        """Numbers of the key-value cache a token."""
        return 2 * self.layers * self.kv_heads * self.head_size


SHAPES = {
    "0.6B": Shape(1024, 28, 16, 3072, tied=True),
    "1.7B": Shape(2048, 28, 16, 6144, tied=True),
    "4B": Shape(2560, 36, 32, 9728, tied=True),
    "8B": Shape(4096, 36, 32, 12288),
    "14B": Shape(5120, 40, 40, 17408),
    "32B": Shape(5120, 64, 64, 25600),
    "70B": Shape(8192, 80, 64, 28672, vocabulary=128_256),
}
