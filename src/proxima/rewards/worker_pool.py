"""`WorkerPool`: a few worker processes that share calls. In: calls. Out: their values, or why one has none.

A call that hangs, crashes or raises costs itself alone: its process is ended and a spare one, which is loaded
already, takes its place. No call is given to a process that is not loaded, so that the others do not wait for
an import while any process is there.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from proxima.core.json_record import Record
from proxima.rewards.reward_options import check_limits
from proxima.rewards.worker_process import (
    JsonValue,
    WorkerFailure,
    WorkerProcess,
    check_system,
    pickled,
)
from proxima.rewards.worker_supply import WorkerSupply

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
        spare: bool = True,
        once: bool = True,
    ):
        """
        Args:
            target: what every call is made to, as `WorkerProcess` takes it.
            workers: processes.
            timeout: seconds for one call.
            memory_mb: most address space of one process, in MiB; 0 = no limit, and no spare: where a model
                on a GPU is what needs it, that would be a second copy.
            retries: further attempts of a call that failed.
            network: False = none, where the kernel allows.
            imports: modules, as `WorkerProcess` takes them.
            sandbox: for code of the policy: as `WorkerProcess` has it.
            spare: whether to keep one more than are used at once.
            once: whether a sandbox is for one call.
        """
        check_limits(
            "a reward", timeout, workers=(workers, 1), memory_mb=(memory_mb, 0), retries=(retries, 0)
        )
        check_system()
        if callable(target):
            pickled(target)  # reports now what cannot be sent
        self._count, self._spares = workers, int(spare and memory_mb > 0)
        self.timeout = timeout
        self.retries = retries
        self._is_used_once = sandbox and once
        limits: Record = {"network": network, "sandbox": sandbox, "imports": imports}
        self._supply = WorkerSupply(lambda: WorkerProcess(target, memory_mb=memory_mb or None, **limits))

    def map(self, calls: Sequence[Call]) -> list[JsonValue | WorkerFailure]:
        """The value of each call, or its failure."""
        results: list[JsonValue | WorkerFailure] = [WorkerFailure("exit", "it was not called")] * len(calls)
        waiting = deque((number, self.retries) for number in range(len(calls)))
        stopped = threading.Event()

        def drain() -> None:
            while (got := self._next(waiting)) is not None:
                worker, number, left = got
                results[number] = reply = self._reply(worker, calls[number])
                if not isinstance(reply, WorkerFailure):
                    continue
                if left and not stopped.is_set():
                    waiting.append((number, left - 1))
                if reply.at_start and not self._supply.has_loaded:  # the others would not start either
                    results[:] = [reply] * len(calls)
                    waiting.clear()

        count = min(self._count, len(calls))
        threads = [threading.Thread(target=drain, daemon=True) for _ in range(count)]
        try:
            self._supply.fill(count + self._spares if calls else 0)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C
            stopped.set()
            waiting.clear()
            self._supply.cancel()
            raise
        return results

    def _next(self, waiting: deque[tuple[int, int]]) -> tuple[WorkerProcess | WorkerFailure, int, int] | None:
        """A loaded process and a call for it: its number, and how often it may be tried again."""
        worker: WorkerProcess | WorkerFailure | None
        try:
            worker = self._supply.take(lambda: bool(waiting))
        except WorkerFailure as failure:
            worker = failure
        if worker is None:
            return None
        try:
            return worker, *waiting.popleft()
        except IndexError:  # another has taken it
            if isinstance(worker, WorkerProcess):
                self._supply.give_back(worker)
            return None

    def _reply(self, worker: WorkerProcess | WorkerFailure, call: Call) -> JsonValue | WorkerFailure:
        if isinstance(worker, WorkerFailure):
            return worker
        try:
            return worker.request(None, *call, self.timeout)
        except WorkerFailure as failure:
            return failure
        finally:
            if self._is_used_once:
                worker.close()
            self._supply.give_back(worker)

    def close(self) -> None:
        self._supply.close()


def summarize(failures: Sequence[WorkerFailure]) -> str:
    """How many calls failed in which way, and the last in words: `2 timeout, 1 crash; ...`."""
    kinds = Counter(failure.kind for failure in failures)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{counted}; {failures[-1].message}" if failures else ""
