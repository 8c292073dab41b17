"""`BatchPlan`: which prompts a step trains on. In: prompts, and a step's number. Out: its epoch and batch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from proxima.core.json_record import Record

CHECKED_AT_ONCE = 512  # prompts tokenised together before a run


@dataclass(frozen=True)
class BatchPlan:
    """Which prompts each step trains on: all of them in each epoch, shuffled by (seed, epoch)."""

    prompts: Sequence[str]
    batch_size: int
    epochs: int
    seed: int
    fingerprints: Record
    """Of prompts and validation prompts: how many, and a hash of all."""

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.prompts) / self.batch_size)

    def at(self, position: int) -> tuple[int, list[str]]:
        """The epoch and the batch of a step, both counted from 0."""
        epoch, batch = divmod(position, self.steps_per_epoch)
        order = _permutation(len(self.prompts), self.seed, epoch)
        chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
        return epoch, [self.prompts[i] for i in chosen.tolist()]


@lru_cache(maxsize=2)  # a step may look at the next one's prompts
def _permutation(count: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(count, generator=generator)


def fingerprint(prompts: Sequence[str], check: Callable[[Sequence[str], int], None]) -> Record:
    """How many prompts there are, and a hash of all; they are read a part at a time, and no part is kept.

    Args:
        check: refuses prompts that no step could read; called with each part and the number of its first.
    """
    if isinstance(prompts, str) or not len(prompts):
        check(prompts, 0)
    digest = hashlib.sha256()
    for first in range(0, len(prompts), CHECKED_AT_ONCE):
        part = prompts[first : first + CHECKED_AT_ONCE]
        check(part, first)
        for prompt in part:
            row = [prompt, getattr(prompt, "columns", {})]
            text = json.dumps(row, sort_keys=True, default=lambda item: type(item).__name__)
            digest.update(text.encode())
    return {"count": len(prompts), "sha256": digest.hexdigest()}
