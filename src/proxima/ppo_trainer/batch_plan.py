"""`Plan`: which prompts a step trains on. In: prompts, and a step's number. Out: its epoch and batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """Which prompts each step trains on: all of them an epoch, shuffled by (seed, epoch)."""

    prompts: Sequence[str]
    batch_size: int
    epochs: int
    seed: int
    fingerprints: dict[str, Any]
    """Of prompts and validation prompts: how many, and a hash of all."""

    @property
    def steps_an_epoch(self) -> int:
        return math.ceil(len(self.prompts) / self.batch_size)

    def at(self, position: int) -> tuple[int, list[str]]:
        """The epoch and the batch of a step, both counted from 0."""
        epoch, batch = divmod(position, self.steps_an_epoch)
        order = _permutation(len(self.prompts), self.seed, epoch)
        return epoch, [
            self.prompts[i] for i in order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()
        ]


@lru_cache(maxsize=2)  # a step may look at the next one's prompts
def _permutation(count: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(count, generator=generator)
