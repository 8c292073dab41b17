"""`WorkerPool`: a few worker processes that share calls. In: calls. Out: their values, or why one has none.

A call that hangs, crashes or raises costs itself alone: its process is ended and another takes its place.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from proxima.core.json_record import Record
from proxima.rewards.reward_options import check_limits
from proxima.rewards.reward_outcome import in_one_line
from proxima.rewards.worker_process import (
    JsonValue,
    WorkerFailure,
    WorkerProcess,
    check_system,
    pickled,
)

TIMEOUT = 10.0
MEMORY_MB = 4096
Call: TypeAlias = tuple[Sequence[JsonValue], Mapping[str, JsonValue]]
"""Arguments by position and by name."""


class WorkerPool:
    """Keeps its processes between calls; the first call starts them."""

    def __init__(
        self,
        target: str | Callable[..., object],
        *,
        workers: int = 1,
        timeout: float = TIMEOUT,
        memory_mb: int = MEMORY_MB,
        retries: int = 0,
        network: bool = True,
        sandbox: bool = False,
        imports: Sequence[str] = (),
    ):
        """
        Args:
            target: what every call is made to, as `WorkerProcess` takes it.
            workers: processes.
            timeout: seconds for one call.
            memory_mb: most address space of one process, in MiB; 0 = no limit.
            retries: further attempts of a call that failed.
            network: False = none, where the kernel allows.
            imports: modules, as `WorkerProcess` takes them.
            sandbox: for code of the policy: as `WorkerProcess` has it, and a new process for every call.
        """
        check_limits(
            "a reward", timeout, workers=(workers, 1), memory_mb=(memory_mb, 0), retries=(retries, 0)
        )
        check_system()
        if callable(target):
            pickled(target)  # reports now what cannot be sent
        self._target = target
        self.timeout, self.retries = timeout, retries
        self._limits: Record = {
            "memory_mb": memory_mb or None,
            "network": network,
            "sandbox": sandbox,
            "imports": imports,
        }
        self._has_started = False
        self._workers: list[WorkerProcess | None] = [None] * workers

    def map(self, calls: Sequence[Call]) -> list[JsonValue | WorkerFailure]:
        """The value of each call, or its failure."""
        results: list[JsonValue | WorkerFailure] = [WorkerFailure("exit", "it was not called")] * len(calls)
        waiting = deque((number, self.retries) for number in range(len(calls)))
        stopped = threading.Event()

        def drain(slot: int) -> None:
            while True:
                try:
                    number, left = waiting.popleft()
                except IndexError:
                    return
                results[number] = reply = self._reply(slot, calls[number])
                if not isinstance(reply, WorkerFailure):
                    continue
                if left and not stopped.is_set():
                    waiting.append((number, left - 1))
                if reply.at_start and not self._has_started:  # the others would not start either
                    results[:] = [reply] * len(calls)
                    waiting.clear()

        slots = range(min(len(self._workers), len(calls)))
        threads = [threading.Thread(target=drain, args=(slot,), daemon=True) for slot in slots]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C
            stopped.set()
            waiting.clear()
            given_up, self._workers = self._workers, [None] * len(self._workers)  # no use to later calls
            for worker in given_up:
                if worker is not None:
                    worker.cancel()
            raise
        return results

    def _reply(self, slot: int, call: Call) -> JsonValue | WorkerFailure:
        try:
            return self._call(slot, call)
        except WorkerFailure as failure:
            return failure
        except Exception as error:  # no process could be made
            return WorkerFailure("exit", in_one_line(error), at_start=True)

    def _call(self, slot: int, call: Call) -> JsonValue:
        worker = self._workers[slot]
        if worker is None or not worker.alive:
            worker = self._workers[slot] = self._start()
        try:
            worker.start()
            self._has_started = True
            return worker.request(None, *call, self.timeout)
        except WorkerFailure:
            if (
                not worker.alive and not self._limits["sandbox"]
            ):  # the next one loads what it needs while others work
                self._workers[slot] = self._start()
            raise
        finally:
            if self._limits["sandbox"]:
                worker.close()

    def _start(self) -> WorkerProcess:
        return WorkerProcess(self._target, **self._limits)

    def close(self) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.close()


def summarize(failures: Sequence[WorkerFailure]) -> str:
    """How many calls failed in which way, and the last in words: `2 timeout, 1 crash; ...`."""
    kinds = Counter(failure.kind for failure in failures)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{counted}; {failures[-1].message}" if failures else ""
