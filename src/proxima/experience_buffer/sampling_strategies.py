"""How a buffer is cut into minibatches (at random, by a token budget, …): one function per strategy, found by
its name.

In: the sequences that are held. Out: the rows of each minibatch; every sequence comes exactly once per epoch.
Orders follow the sequences' keys, not their places.

    shuffled         a new permutation in each epoch, `minibatch_size` sequences per minibatch
    sequential       as stored
    length_balanced  shuffled, but every minibatch gets its share of long and of short sequences
    token_budget     shuffled, as many sequences per minibatch as fit `token_budget` tokens (at least one)

A new strategy is a function like these, its name in `STRATEGIES` and in the setting `buffer_sampling`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from proxima.core.sampling import shuffled_order


class HeldSequences(NamedTuple):
    """What a strategy may look at."""

    keys: Tensor  # (N,) identity of each sequence
    sizes: Tensor  # (N,) tokens of each sequence, its prompt included
    minibatch_size: int
    token_budget: int
    seed: int
    step: int
    epoch: int

    def shuffle(self, rows: Tensor) -> Tensor:
        """These rows in the order of this seed, step and epoch."""
        return rows[shuffled_order(self.keys[rows], self.seed, self.step, self.epoch)]


def sequential(held: HeldSequences) -> list[Tensor]:
    return list(torch.arange(len(held.keys)).split(held.minibatch_size))


def shuffled(held: HeldSequences) -> list[Tensor]:
    return list(held.shuffle(torch.arange(len(held.keys))).split(held.minibatch_size))


def length_balanced(held: HeldSequences) -> list[Tensor]:
    """Each minibatch gets one sequence of every band of similar lengths."""
    rows = held.shuffle(torch.arange(len(held.keys)))
    by_length = rows[torch.argsort(held.sizes[rows], descending=True, stable=True)]
    batches = -(-len(rows) // held.minibatch_size)
    bands = [held.shuffle(band).tolist() for band in by_length.split(batches)]
    return [
        torch.tensor([row for row in batch if row is not None])  # the last band may be short
        for batch in zip_longest(*bands)
    ]


def token_budget(held: HeldSequences) -> list[Tensor]:
    batches: list[list[int]] = []
    left = 0
    for row in held.shuffle(torch.arange(len(held.keys))).tolist():
        size = int(held.sizes[row])
        if not batches or size > left:
            batches.append([])
            left = held.token_budget
        batches[-1].append(row)
        left -= size
    return [torch.tensor(batch) for batch in batches]


STRATEGIES: dict[str, Callable[[HeldSequences], list[Tensor]]] = {
    "shuffled": shuffled,
    "sequential": sequential,
    "length_balanced": length_balanced,
    "token_budget": token_budget,
}
