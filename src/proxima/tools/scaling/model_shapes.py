"""Shapes of dense decoders by size: Qwen3 up to 32B; 70B is Llama 3's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The widths and counts that determine time and memory."""

    hidden: int
    layers: int
    heads: int
    inner: int
    """Width of the feed-forward layer."""
    vocabulary: int = 151_936
    tied: bool = False
    """Whether output head and embeddings share their weights."""
    kv_heads: int = 8
    head_size: int = 128

    @property
    def layer_widths(self) -> int:
        """Inputs plus outputs of a layer's linear maps (queries, keys and values are fused; so are gate and
        up)."""
        queries = self.heads * self.head_size
        keys = self.kv_heads * self.head_size
        return (
            (self.hidden + queries + 2 * keys)
            + (queries + self.hidden)
            + (self.hidden + 2 * self.inner)
            + (self.inner + self.hidden)
        )

    @property
    def layer_weights(self) -> int:
        queries = self.heads * self.head_size
        keys = self.kv_heads * self.head_size
        return self.hidden * (2 * queries + 2 * keys + 3 * self.inner)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        return self.layers * self.layer_weights + self.head_weights * (1 if self.tied else 2)

    def adapter_weights(self, rank: int) -> int:
        """Weights of adapters on every linear map; queries, keys, values, gate and up have one each."""
        return self.layers * rank * (self.layer_widths + 3 * self.hidden)

    @property
    def cached(self) -> int:
        """Numbers per token in the key-value cache."""
        return 2 * self.layers * self.kv_heads * self.head_size


SHAPES = {
    "0.6B": ModelShape(1024, 28, 16, 3072, tied=True),
    "1.7B": ModelShape(2048, 28, 16, 6144, tied=True),
    "4B": ModelShape(2560, 36, 32, 9728, tied=True),
    "8B": ModelShape(4096, 36, 32, 12288),
    "14B": ModelShape(5120, 40, 40, 17408),
    "32B": ModelShape(5120, 64, 64, 25600),
    "70B": ModelShape(8192, 80, 64, 28672, vocabulary=128_256),
}
