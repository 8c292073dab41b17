"""`MicroBatches`: splits a rollout into forward passes that fit in memory, halved when memory runs out.

This only bounds memory: sums over a minibatch are the same however it is split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from proxima.config import PPOConfig
from proxima.core.types import Tokens
from proxima.runtime import free_cached_memory, is_out_of_memory
from proxima.runtime.engine import cut

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class MicroBatches:
    """One memory budget for all passes of a trainer."""

    def __init__(self, size: int, tokens: int, minibatch: int):
        """
        Args:
            size, tokens: most sequences and tokens in one pass.
            minibatch: sequences of an optimiser step; scoring passes have the same size as training ones.
        """
        self.size = size
        self.tokens = tokens
        self.minibatch = minibatch
        self.may_halve = True  # not where other processes join every pass

    @classmethod
    def of(cls, config: PPOConfig) -> MicroBatches:
        return cls(config.micro_batch_size, config.micro_batch_tokens, config.minibatch_size)

    def rows(self, tokens: Tokens) -> list[Tensor]:
        """The rows of each pass, in order: as few passes as the budget allows, of about equal size, with at
        least one row each."""
        lengths = (tokens.prompt_sizes + tokens.sizes).tolist()
        if not lengths:
            return []
        count = min(len(lengths), self.minibatch)
        mean = sum(lengths) / len(lengths)
        passes = max(math.ceil(count * mean / self.tokens), math.ceil(count / self.size))
        limit = min(self.tokens, math.ceil(math.ceil(count / passes) * mean) + max(lengths) - min(lengths))
        return [torch.tensor(group) for group in cut(lengths, limit, self.size)]

    def run(self, work: Callable[[], Result], longest: int) -> Result:
        """Run `work`; when the device is out of memory, halve the budget and run all of it again."""
        while True:
            try:
                return work()
            except RuntimeError as error:
                least = not self.may_halve or self.size <= 1 or self.tokens <= longest
                if least or not is_out_of_memory(error):
                    raise
                self.size = max(1, self.size // 2)
                self.tokens = max(longest, self.tokens // 2)
            free_cached_memory()
            log.warning(
                "out of GPU memory: micro-batches are now %d sequences, %d tokens", self.size, self.tokens
            )
