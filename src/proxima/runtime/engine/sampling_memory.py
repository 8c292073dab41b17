"""How much memory sampling takes: the tokens of a prefill, and how many sequences have a cache at once.

It follows from the device and the model, never from what is free at the moment, so that the same run takes
the same again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from proxima.runtime.engine.slot_schedule import bucket

CACHE_STEP = 64  # tokens by which the cache grows
MAX_SLOTS = 256  # sequences sampled at once where memory allows
FEWEST = 8  # on a GPU, where the weights are read at every step however few there are
CACHE_SHARE = 1 / 3  # of the memory that weights and optimisers leave: a cache beside activations and logits
CACHED_PASSES = 4  # where memory is short, the cache holds the tokens of this many passes


class SamplingMemory(NamedTuple):
    """What bounds a call of `Generation.generate`."""

    cache: float
    """Cached tokens of all slots together, inf = no limit."""
    fewest: int
    """Slots that there are even where their caches hold more."""
    prefill: int | None = None
    """Prompt tokens that are read at once; None = the usual number."""

    def slots(self, longest: int) -> int:
        """Sequences of up to this many tokens that are sampled at once."""
        return int(max(self.fewest, min(MAX_SLOTS, self.cache // longest)))

    def cache_size(self, count: int, longest: int, on_gpu: bool, most: int = MAX_SLOTS) -> tuple[int, int]:
        """Slots of a cache for this many sequences of up to this many tokens, and tokens of each."""
        each = -(-longest // CACHE_STEP) * CACHE_STEP
        return min(bucket(count, on_gpu), most, self.slots(each)), each


def cache_tokens(memory: int | None, held: int, per_token: int) -> float:
    """Tokens whose keys and values fit in a device's memory.

    Args:
        memory: of the device, in bytes; None = not known.
        held: bytes of weights, gradients and moments.
        per_token: bytes that a token's keys and values take.
    """
    if memory is None or not per_token:
        return math.inf
    return CACHE_SHARE * max(0, memory - held) // per_token


def fewest_slots(on_gpu: bool) -> int:
    return FEWEST if on_gpu else 1
