"""`MicroBatches`: how much one forward pass reads. In: a rollout. Out: rows of each pass; halved when memory
runs out.

Memory only: sums over a minibatch are the same however it is cut.
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
from proxima.runtime.engine.layout import cut

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class MicroBatches:
    """One budget for all passes of a trainer."""

    def __init__(self, size: int, tokens: int, minibatch: int):
        """
        Args:
            size, tokens: most sequences and tokens in one pass.
            minibatch: sequences of an optimiser step; passes are cut to suit it, scoring in the same cuts.
        """
        self.size, self.tokens, self.minibatch = size, tokens, minibatch
        self.may_halve = True  # not where other processes take part in every pass

    @classmethod
    def of(cls, config: PPOConfig) -> MicroBatches:
        return cls(config.micro_batch_size, config.micro_batch_tokens, config.minibatch_size)

    def rows(self, tokens: Tokens) -> list[Tensor]:
        """The rows in order, in as few passes as the budget allows and about equal ones; at least one row
        a pass."""
        lengths = (tokens.prompt_sizes + tokens.sizes).tolist()
        if not lengths:
            return []
        count, mean = min(len(lengths), self.minibatch), sum(lengths) / len(lengths)
        passes = max(math.ceil(count * mean / self.tokens), math.ceil(count / self.size))
        limit = min(self.tokens, math.ceil(math.ceil(count / passes) * mean) + max(lengths) - min(lengths))
        return [torch.tensor(group) for group in cut(lengths, limit, self.size)]

    def run(self, work: Callable[[], Result], longest: int) -> Result:
        """Do the work; when the device is out of memory, halve the budget and do all of it again."""
        while True:
            try:
                return work()
            except torch.cuda.OutOfMemoryError:
                if not self.may_halve or self.size <= 1 or self.tokens <= longest:
                    raise
                self.size, self.tokens = max(1, self.size // 2), max(longest, self.tokens // 2)
            torch.cuda.empty_cache()
            log.warning(
                "out of GPU memory: micro-batches are now %d sequences, %d tokens", self.size, self.tokens
            )
