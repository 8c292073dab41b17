"""`MicroBatches`: how much one forward pass reads. In: a rollout. Out: rows of each pass; halved when memory runs out.

Memory only: sums over a minibatch are the same however it is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from proxima.types import Tokens

log = logging.getLogger(__name__)

Result = TypeVar("Result")
SCORING = 4  # passes without gradients may read so many times more


class MicroBatches:
    """One budget for all passes of a trainer."""

    def __init__(self, size: int, tokens: int):
        self.size, self.tokens = size, tokens

    def rows(self, tokens: Tokens, scoring: bool = False) -> list[Tensor]:
        """The rows in order, cut where a pass would hold too many sequences or tokens; at least one a pass."""
        factor = SCORING if scoring else 1
        lengths = (tokens.prompt_sizes + tokens.sizes).tolist()
        groups: list[list[int]] = []
        room = 0
        for row, length in enumerate(lengths):
            if not groups or length > room or len(groups[-1]) >= factor * self.size:
                groups.append([])
                room = factor * self.tokens
            groups[-1].append(row)
            room -= length
        return [torch.tensor(group) for group in groups]

    def run(self, work: Callable[[], Result], longest: int) -> Result:
        """Do the work; when the device is out of memory, halve the budget and do all of it again."""
        while True:
            try:
                return work()
            except torch.cuda.OutOfMemoryError:
                if self.size <= 1 or self.tokens <= longest:
                    raise
                self.size, self.tokens = max(1, self.size // 2), max(longest, self.tokens // 2)
            torch.cuda.empty_cache()
            log.warning("out of GPU memory: micro-batches are now %d sequences, %d tokens", self.size, self.tokens)
