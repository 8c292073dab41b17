"""`WorkerSupply`: loaded worker processes, as many as are used at once and a spare. In: how to make one. Out:
one that is ready to be called.

Processes load in the background, the spare too: where one is killed, another is ready.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from proxima.rewards.reward_outcome import in_one_line
from proxima.rewards.worker_process import WorkerFailure, WorkerProcess

LOOK_SECONDS = 0.05  # between two looks whether a process is still needed


class WorkerSupply:
    """Keeps its processes until it is closed, and may be used again after that."""

    def __init__(self, make: Callable[[], WorkerProcess]):
        self._make = make
        self._changed = threading.Condition()
        self._ready: list[WorkerProcess] = []
        self._loading: dict[WorkerProcess, threading.Thread] = {}
        self._used: set[WorkerProcess] = set()
        self._count = 0
        self._failure: WorkerFailure | None = None  # of the last one that could not be loaded
        self.has_loaded = False
        """Whether any has ever been."""

    def fill(self, count: int = 0) -> None:
        """Begin to load what is missing.

        Args:
            count: of processes to keep from now on, at least.
        """
        with self._changed:
            self._count = max(self._count, count)
            for _ in range(self._count - len(self._ready) - len(self._loading) - len(self._used)):
                self._load()

    def take(self, is_needed: Callable[[], bool]) -> WorkerProcess | None:
        """A loaded one, as soon as there is one; None once it is not needed any more.

        A WorkerFailure where none could be loaded.
        """
        with self._changed:
            while is_needed():
                if self._ready:
                    worker = self._ready.pop()
                    self._used.add(worker)
                    return worker
                if not self._loading and self._failure is not None:
                    failure = self._failure
                    if self.has_loaded:  # the next call tries again
                        self._failure = None
                    raise failure
                if not self._loading:
                    self._load()
                self._changed.wait(LOOK_SECONDS)
        return None

    def give_back(self, worker: WorkerProcess) -> None:
        """After a call; where it has ended, another is loaded."""
        with self._changed:
            self._used.discard(worker)
            if worker.alive:
                self._ready.append(worker)
            self._changed.notify_all()
        self.fill()

    def cancel(self) -> None:
        """Make the calls that are under way fail soon."""
        with self._changed:
            for worker in self._used:
                worker.cancel()

    def close(self) -> None:
        """End all that are not used just now."""
        with self._changed:
            self._count, self._failure = 0, None
            loading = dict(self._loading)
        for worker, thread in loading.items():
            worker.cancel()
            thread.join()
        with self._changed:
            ready = self._ready
            self._ready = []
            self._failure = None
        for worker in ready:
            worker.close()

    def _load(self) -> None:
        self._failure = None
        try:
            worker = self._make()
        except Exception as error:  # no process could be made
            self._failure = WorkerFailure("exit", in_one_line(error), at_start=True)
            return
        self._loading[worker] = thread = threading.Thread(target=self._wait_for, args=(worker,), daemon=True)
        thread.start()

    def _wait_for(self, worker: WorkerProcess) -> None:
        failure = None
        try:
            worker.start()
        except WorkerFailure as error:
            failure = error
        except Exception as error:  # what a worker is sent may raise when it is encoded
            worker.close()
            failure = WorkerFailure("exit", in_one_line(error), at_start=True)
        with self._changed:
            del self._loading[worker]
            if failure is None:
                self._ready.append(worker)
                self.has_loaded = True
            self._failure = failure
            self._changed.notify_all()
