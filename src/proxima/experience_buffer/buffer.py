"""`ExperienceBuffer`: holds finished rollouts within a bound and hands them out in minibatches.

Sampling strategies are in `sampling_strategies`.

Memory: `nbytes` counts every tensor held in memory and stays within `max_bytes`. Past it: `error` refuses the
new data and keeps the old; `drop_oldest` forgets the oldest sequences (never the new ones in part: data
larger than the bound is refused); `disk` moves what does not fit to memory-mapped files, which do not count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from proxima.core.pairs import PairsLike, SAPairs, as_pairs
from proxima.experience_buffer.sampling_strategies import STRATEGIES, HeldSequences


@dataclass(frozen=True)
class BatchedData:
    """All that the buffer holds, drawn in minibatches: `for batch in data.epoch(0)`; iterating it is epoch
    0."""

    parts: list[SAPairs]
    strategy: str
    minibatch_size: int
    token_budget: int
    seed: int
    step: int
    device: torch.device

    def __iter__(self) -> Iterator[SAPairs]:
        return self.epoch(0)

    def __len__(self) -> int:
        return len(self.order(0))

    def epoch(self, number: int) -> Iterator[SAPairs]:
        """The minibatches of one pass; each sequence comes exactly once."""
        for rows in self.order(number):
            yield self._gather(rows)

    def _gather(self, rows: Tensor) -> SAPairs:
        """These rows of all parts, on the training device; nothing else is read from disk."""
        found = []
        first = 0
        for part in self.parts:
            inside = rows[(rows >= first) & (rows < first + part.batch_size)] - first
            if len(inside):
                found.append(part.select(inside).map(lambda tensor: tensor.to(self.device)))
            first += part.batch_size
        return SAPairs.cat(found)

    def order(self, epoch: int) -> list[Tensor]:
        """Rows of each minibatch."""
        held = HeldSequences(
            keys=torch.cat([part.sequence_keys.cpu() for part in self.parts]),
            sizes=torch.cat([part.sequence_sizes.cpu() for part in self.parts]),
            minibatch_size=self.minibatch_size,
            token_budget=self.token_budget,
            seed=self.seed,
            step=self.step,
            epoch=epoch,
        )
        return STRATEGIES[self.strategy](held)


class ExperienceBuffer:
    """Stores rollouts; see the module's first lines for sampling and overflow."""

    def __init__(
        self,
        max_bytes: int = 8 * 2**30,
        overflow: Literal["error", "drop_oldest", "disk"] = "error",
        strategy: str = "shuffled",
        storage: Literal["device", "cpu", "disk"] = "device",
        minibatch_size: int = 8,
        token_budget: int = 4096,
        seed: int = 0,
        folder: str | Path | None = None,
    ):
        """
        Args:
            folder: where memory-mapped files go; by default the system's place for temporary files.
        """
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy ({strategy!r}) must be one of {', '.join(STRATEGIES)}")
        self.max_bytes = max_bytes
        self.overflow = overflow
        self.strategy = strategy
        self.storage = storage
        self.minibatch_size = minibatch_size
        self.token_budget = token_budget
        self.seed = seed
        self._folder = folder
        self._parts: list[tuple[SAPairs, tempfile.TemporaryDirectory[str] | None]] = []
        self.dropped_sequences = 0

    def store(self, data: PairsLike, step: int = 0) -> BatchedData:
        """Add a rollout and return all that is held, ready to be drawn in minibatches.

        Args:
            data: finished pairs; plain dicts too (of these the numbers count towards the bound).
            step: the PPO step; with the seed and the epoch it fixes the shuffle.
        """
        data = as_pairs(data)
        if not data.batch_size:
            raise ValueError("there are no sequences to store")
        home = data.mask.device
        if self.storage == "disk":
            self._parts.append(self._mapped(data))
        else:
            placed = data.map(lambda tensor: _compact(tensor.cpu() if self.storage == "cpu" else tensor))
            self._make_room(placed)
        parts = [part for part, _ in self._parts]
        return BatchedData(
            parts, self.strategy, self.minibatch_size, self.token_budget, self.seed, step, home
        )

    def clear(self) -> None:
        """Forget everything; PPO is on-policy, so each step starts so."""
        for _, home in self._parts:
            if home is not None:
                home.cleanup()
        self._parts.clear()

    def __len__(self) -> int:
        return sum(part.batch_size for part, _ in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held in memory (memory-mapped files do not count)."""
        return sum(size_in_bytes(part) for part, file in self._parts if file is None)

    def _make_room(self, data: SAPairs) -> None:
        need = size_in_bytes(data)
        if self.nbytes + need > self.max_bytes and self.overflow == "disk":
            self._parts.append(self._mapped(data))
            return
        if need > self.max_bytes or (self.nbytes + need > self.max_bytes and self.overflow == "error"):
            raise MemoryError(
                f"the rollout takes {need:,} bytes and the buffer holds {self.nbytes:,} of at most "
                f"{self.max_bytes:,}; "
                f"raise buffer_max_bytes, lower batch_size, or set buffer_overflow to disk"
            )
        while self.nbytes + need > self.max_bytes:
            oldest = next(i for i, (_, file) in enumerate(self._parts) if file is None)
            part = self._parts[oldest][0]
            excess = self.nbytes + need - self.max_bytes
            drop = min(part.batch_size, -(-excess * part.batch_size // size_in_bytes(part)))
            self.dropped_sequences += drop
            if drop == part.batch_size:
                del self._parts[oldest]
            else:
                self._parts[oldest] = (part.select(torch.arange(drop, part.batch_size)).map(_compact), None)
        self._parts.append((data, None))

    def _mapped(self, data: SAPairs) -> tuple[SAPairs, tempfile.TemporaryDirectory[str]]:
        """The same pairs over memory-mapped files, which vanish with the buffer."""
        home = tempfile.TemporaryDirectory(prefix="proxima-buffer-", dir=self._folder)
        count = 0

        def to_disk(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            path = str(Path(home.name) / f"{count}.bin")
            mapped = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(
                tensor.shape
            )
            return mapped.copy_(tensor)

        return data.map(to_disk), home


def _compact(tensor: Tensor) -> Tensor:
    """The tensor without the wider storage that it may be a window on: else the bound would not be real."""
    return (
        tensor.clone()
        if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        else tensor
    )


def size_in_bytes(pairs: SAPairs) -> int:
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    pairs.map(add)
    return total
