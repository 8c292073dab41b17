"""`Processes`: the processes of a run, their collective operations (all-reduce, all-gather, broadcast), and
how a minibatch is dealt to them.

Every collective is called here, in `gradient_sync.py` or in `sharding.py`. With one process each of them is
the identity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from proxima.core.errors import EngineFailure, ProcessLost, RewardFailure, first_line

Result = TypeVar("Result")

ERROR_TYPES: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, OSError, MemoryError, RewardFailure, EngineFailure, ProcessLost)
}
"""Errors that keep their type on other processes; any other becomes a RuntimeError there."""


@dataclass
class Processes:
    """This process and its place among all; by default the only one."""

    rank: int = 0
    world_size: int = 1
    uses_nccl: bool = False
    """Tensors travel from GPU to GPU (NCCL); otherwise through CPU memory (gloo)."""
    before_collective: Callable[[], None] | None = None
    """Called before each collective. With sharded weights it joins the forward passes that other processes
    still run."""

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def is_main(self) -> bool:
        """The process that logs and writes files."""
        return self.rank == 0

    def shares(self, total: int) -> list[int]:
        """How many of `total` rows each process has: contiguous, in order, as equal as possible (0 where
        there are too few)."""
        bounds = [rank * total // self.world_size for rank in range(self.world_size + 1)]
        return [end - start for start, end in pairwise(bounds)]

    def rows(self, total: int) -> Tensor:
        """This process's rows of a batch."""
        return torch.arange(self.rank * total // self.world_size, (self.rank + 1) * total // self.world_size)

    def balanced_rows(self, lengths: Tensor) -> Tensor:
        """This process's rows of a minibatch, by lengths (B,).

        Sorted by length, rows are dealt back and forth, so that all processes get about as many tokens.
        """
        places = torch.arange(len(lengths))
        turn = places // self.world_size
        seat = places % self.world_size
        owner = torch.where(turn % 2 == 0, seat, self.world_size - 1 - seat)
        by_length = torch.argsort(lengths, descending=True, stable=True)
        return by_length[owner == self.rank].sort().values

    def all_gather(self, rows: Tensor, total: int) -> Tensor:
        """All `total` rows of a batch, from each process's own (b, ...); shapes agree in all but b."""
        if not self.is_distributed:
            return rows
        shares = self.shares(total)
        padded = rows.new_zeros(max(shares), *rows.shape[1:])
        padded[: len(rows)] = rows
        sent = self._comm_buffer(padded.to(torch.uint8) if rows.dtype == torch.bool else padded)
        parts = [torch.empty_like(sent) for _ in shares]
        with self.collective():
            dist.all_gather(parts, sent)
        gathered = torch.cat([part[:share] for part, share in zip(parts, shares, strict=True)])
        return gathered.to(rows.device, rows.dtype)

    def sum(self, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sum of each number over all processes."""
        return self._reduce_each(numbers, dist.ReduceOp.SUM)

    def max(self, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The maximum of each number over all processes."""
        return self._reduce_each(numbers, dist.ReduceOp.MAX)

    def _reduce_each(self, numbers: dict[str, Tensor], op: dist.ReduceOp.RedOpType) -> dict[str, Tensor]:
        if not self.is_distributed:
            return numbers
        stacked = torch.stack([number.float() for number in numbers.values()])
        return dict(zip(numbers, self.all_reduce(stacked, op), strict=True))

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """One tensor reduced over all processes; it may be changed in place."""
        sent = self._comm_buffer(tensor)
        with self.collective():
            dist.all_reduce(sent, op)
        return sent.to(tensor.device)

    def all_reduce_max(self, number: int) -> int:
        if not self.is_distributed:
            return number
        return int(self.all_reduce(torch.tensor(number), dist.ReduceOp.MAX))

    def all_reduce_min(self, number: int) -> int:
        return -self.all_reduce_max(-number)

    def all_reduce_sum(self, number: int) -> int:
        return int(self.all_reduce(torch.tensor(number))) if self.is_distributed else number

    def all_gather_object(self, value: Result) -> list[Result]:
        """The value of each process, by rank. It must be JSON."""
        if not self.is_distributed:
            return [value]
        data = _as_bytes(value)
        sizes = self.all_gather(torch.tensor([len(data)]), self.world_size).tolist()
        padded = torch.zeros(1, max(sizes), dtype=torch.uint8)
        padded[0, : len(data)] = data
        gathered = self.all_gather(padded, self.world_size)
        return [_from_bytes(row[:size]) for row, size in zip(gathered, sizes, strict=True)]

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the main process. All processes return its result, which must be JSON, or raise its
        error."""
        if not self.is_distributed:
            return work()
        outcome: list[Any] = []
        if self.is_main:
            try:
                outcome = [work(), None]
            except Exception as error:
                self._broadcast([None, _describe_error(error)])
                raise _mark_shared(error) from error.__cause__
        value, problem = self._broadcast(outcome)
        if problem is not None:
            raise _mark_shared(_rebuild_error(problem, ""))
        return value

    def on_all(self, work: Callable[[], Result]) -> Result:
        """Run `work`, which calls no collective, on all processes. If it fails on one, it fails on all with
        one message."""
        if not self.is_distributed:
            return work()
        result, own = None, None
        try:
            result = work()
        except Exception as error:
            own = error
        problems = self.all_gather_object(None if own is None else _describe_error(own))
        if own is not None:
            raise _mark_shared(own)
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise _mark_shared(_rebuild_error(problem, f"process {rank}: "))
        return result  # type: ignore[return-value]

    def _broadcast(self, value: Result) -> Result:
        """The main process's value, on all processes."""
        data = _as_bytes(value) if self.is_main else torch.zeros(0, dtype=torch.uint8)
        with self.collective():
            size = torch.tensor([len(data)])
            dist.broadcast(size, 0)
            data = data if self.is_main else torch.zeros(int(size), dtype=torch.uint8)
            dist.broadcast(data, 0)
        return value if self.is_main else _from_bytes(data)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around every collective: prepares for it, and reports its failure as a lost process."""
        if self.before_collective is not None:
            self.before_collective()
        with self.lost_peer_errors():
            yield

    @contextmanager
    def lost_peer_errors(self) -> Iterator[None]:
        """Raise `ProcessLost` where a collective fails: another process died, hangs or left."""
        try:
            yield
        except RuntimeError as error:
            raise ProcessLost(self.lost(error)) from error

    def lost(self, error: Exception) -> str:
        """What an error of torch's means: another process died, hangs or left."""
        if isinstance(error, ProcessLost):
            return str(error)
        return (
            f"process {self.rank} of {self.world_size} lost contact with the other processes: one died or "
            f"hangs ({first_sentence(error)})"
        )

    def close(self) -> None:
        """Leave the process group, at the end of a run."""
        if self.is_distributed and dist.is_initialized():
            dist.destroy_process_group()

    def _comm_buffer(self, tensor: Tensor) -> Tensor:
        """The tensor where the backend can send it from: on the GPU for NCCL, on the CPU for gloo."""
        return tensor.contiguous() if self.uses_nccl else tensor.cpu().contiguous()


def first_sentence(error: Exception) -> str:
    """The first sentence of torch's message, without the location in its source."""
    return re.sub(r"\[/\S*\] ?", "", first_line(error)).split(". ")[0]


def _as_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return json.loads(bytes(data.tolist()))


def _describe_error(error: Exception) -> list[str]:
    """Type and message of an error, to be sent to other processes."""
    kind = next((name for name, known in ERROR_TYPES.items() if isinstance(error, known)), "RuntimeError")
    text = str(error) or type(error).__name__
    return [kind, text if kind != "RuntimeError" else f"{type(error).__name__}: {text}"]


def _rebuild_error(description: list[str], where: str) -> Exception:
    kind, text = description
    return ERROR_TYPES.get(kind, RuntimeError)(where + text)


def _mark_shared(error: Exception) -> Exception:
    """Mark an error that all processes raise, so that only the main process prints it."""
    error.shared = True  # type: ignore[attr-defined]
    return error
