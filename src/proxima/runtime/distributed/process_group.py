"""`Processes`: the processes of a run. In: this one's part. Out: sums, maxima, joined rows, the first one's
word; on all alike.

Every exchange between processes is here, in `gradients.py` or in `sharding.py`. With one process all of it is
the identity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from proxima.core.errors import EngineFailure, ProcessLost, RewardFailure

Result = TypeVar("Result")

KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, OSError, MemoryError, RewardFailure, EngineFailure, ProcessLost)
}


@dataclass
class Processes:
    """This process among all; the default is a process by itself."""

    rank: int = 0
    world_size: int = 1
    direct: bool = False
    """Tensors travel from GPU to GPU (NCCL); else through CPU memory (gloo)."""
    settle: Callable[[], None] | None = None
    """Called before each exchange: takes part in forward passes of others, where weights are sharded."""

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def is_main(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    def shares(self, total: int) -> list[int]:
        """How many of `total` rows each process has: in order, and as equal as can be (0 where there are
        too few)."""
        return [
            (i + 1) * total // self.world_size - i * total // self.world_size for i in range(self.world_size)
        ]

    def rows(self, total: int) -> Tensor:
        """This process's rows of a batch."""
        return torch.arange(self.rank * total // self.world_size, (self.rank + 1) * total // self.world_size)

    def balanced_rows(self, lengths: Tensor) -> Tensor:
        """This process's rows of a minibatch (B,): dealt by length, back and forth, so that all have about
        as many tokens."""
        places = torch.arange(len(lengths))
        round_, seat = places // self.world_size, places % self.world_size
        owner = torch.where(round_ % 2 == 0, seat, self.world_size - 1 - seat)
        by_length = torch.argsort(lengths, descending=True, stable=True)
        return by_length[owner == self.rank].sort().values

    def all_gather(self, rows: Tensor, total: int) -> Tensor:
        """All rows of a batch of `total`, from each process's own (b, ...), which agree in all but b."""
        if not self.is_distributed:
            return rows
        shares = self.shares(total)
        padded = rows.new_zeros(max(shares), *rows.shape[1:])
        padded[: len(rows)] = rows
        sent = self._to_send(padded.to(torch.uint8) if rows.dtype == torch.bool else padded)
        parts = [torch.empty_like(sent) for _ in shares]
        with self.exchange():
            dist.all_gather(parts, sent)
        whole = torch.cat([part[:share] for part, share in zip(parts, shares, strict=True)])
        return whole.to(rows.device, rows.dtype)

    def sum(self, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each number added up over all processes."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def max(self, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def _reduced(self, numbers: dict[str, Tensor], how: Any) -> dict[str, Tensor]:
        if not self.is_distributed:
            return numbers
        stacked = torch.stack([number.float() for number in numbers.values()])
        return dict(zip(numbers, self.all_reduce(stacked, how), strict=True))

    def all_reduce(self, tensor: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        """One tensor over all processes; may be changed in place."""
        sent = self._to_send(tensor)
        with self.exchange():
            dist.all_reduce(sent, how)
        return sent.to(tensor.device)

    def largest(self, number: int) -> int:
        return (
            int(self.all_reduce(torch.tensor(number), dist.ReduceOp.MAX)) if self.is_distributed else number
        )

    def smallest(self, number: int) -> int:
        return -self.largest(-number)

    def total(self, number: int) -> int:
        return int(self.all_reduce(torch.tensor(number))) if self.is_distributed else number

    def all_gather_object(self, value: Any) -> list[Any]:
        """One value of each process, as JSON holds it, in order."""
        if not self.is_distributed:
            return [value]
        data = _as_bytes(value)
        sizes = self.all_gather(torch.tensor([len(data)]), self.world_size).tolist()
        padded = torch.zeros(1, max(sizes), dtype=torch.uint8)
        padded[0, : len(data)] = data
        return [
            _from_bytes(row[:size])
            for row, size in zip(self.all_gather(padded, self.world_size), sizes, strict=True)
        ]

    def on_main(self, work: Callable[[], Result]) -> Result:
        """The first process does it; what comes of it (as JSON holds it), or its error, is everyone's."""
        if not self.is_distributed:
            return work()
        outcome: Any = None
        if self.is_main:
            try:
                outcome = [work(), None]
            except Exception as error:
                self._broadcast([None, _described(error)])
                raise _shared(error) from error.__cause__
        value, problem = self._broadcast(outcome)
        if problem is not None:
            raise _shared(_rebuilt(problem, ""))
        return value

    def on_all(self, work: Callable[[], Result]) -> Result:
        """All do it, without exchanges in between; where it fails in one it fails in all, with one
        message."""
        if not self.is_distributed:
            return work()
        result, own = None, None
        try:
            result = work()
        except Exception as error:
            own = error
        problems = self.all_gather_object(None if own is None else _described(own))
        if own is not None:
            raise _shared(own)
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise _shared(_rebuilt(problem, f"process {rank}: "))
        return result  # type: ignore[return-value]

    def _broadcast(self, value: Any) -> Any:
        """The first process's value."""
        data = _as_bytes(value) if self.is_main else torch.zeros(0, dtype=torch.uint8)
        with self.exchange():
            size = torch.tensor([len(data)])
            dist.broadcast(size, 0)
            data = data if self.is_main else torch.zeros(int(size), dtype=torch.uint8)
            dist.broadcast(data, 0)
        return value if self.is_main else _from_bytes(data)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around every exchange: one that fails means that a process died, hangs or left."""
        if self.settle is not None:
            self.settle()
        with self.contact():
            yield

    @contextmanager
    def contact(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            who = f"process {self.rank} of {self.world_size}"
            raise ProcessLost(
                f"{who} lost the others: one died or hangs ({first_sentence(error)})"
            ) from error

    def close(self) -> None:
        """At the end, when all have all they need."""
        if self.is_distributed and dist.is_initialized():
            dist.destroy_process_group()

    def _to_send(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous() if self.direct else tensor.cpu().contiguous()


def first_sentence(error: Exception) -> str:
    """The first sentence of torch's message, without the place in its code."""
    return re.sub(r"\[/\S*\] ?", "", str(error).splitlines()[0]).split(". ")[0]


def _as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return json.loads(bytes(data.tolist()))


def _described(error: Exception) -> list[str]:
    kind = next((name for name, known in KINDS.items() if isinstance(error, known)), "RuntimeError")
    text = str(error) or type(error).__name__
    return [kind, text if kind != "RuntimeError" else f"{type(error).__name__}: {text}"]


def _rebuilt(problem: list[str], where: str) -> Exception:
    return KINDS.get(problem[0], RuntimeError)(where + problem[1])


def _shared(error: Exception) -> Exception:
    """Marked as known to all processes, so that only the first one prints it."""
    error.shared = True  # type: ignore[attr-defined]
    return error
