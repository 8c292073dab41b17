"""Where the code of an environment or a tool runs: in this process, or in one that can be killed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Protocol

from proxima.core.json_record import RecordView
from proxima.rewards import WorkerFailure, WorkerProcess, run_async

LONGEST_REASON = 300  # characters


class HostFailure(Exception):  # noqa: N818
    """A call that brought no value.

    Args:
        raised: the code itself raised, and can be called again.
    """

    def __init__(self, message: str, raised: bool):
        super().__init__(message)
        self.raised = raised


class Host(Protocol):
    """Holds one object, made at the first call, or one function."""

    def call(self, method: str | None, /, *args: object, **named: object) -> object:
        """What a method returns, or, for None, the function; a `HostFailure` where it does not."""

    def close(self) -> None: ...


class LocalHost:
    """In this process: for code that is trusted to return."""

    def __init__(self, target: Callable[..., object], options: RecordView):
        self.target, self.options = target, options
        self.made: object = None

    def call(self, method: str | None, /, *args: object, **named: object) -> object:
        try:
            if method is not None and self.made is None:
                self.made = self.target(**self.options)
            function = self.target if method is None else getattr(self.made, method)
            returned = function(*args, **named)
            return run_async(returned) if inspect.isawaitable(returned) else returned
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            words = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
            raise HostFailure(words[:LONGEST_REASON], raised=True) from None

    def close(self) -> None:
        self.made = None


class WorkerHost:
    """In a process of its own, with a limit on the seconds of each call."""

    def __init__(self, target: str | Callable[..., object], options: RecordView, seconds: float):
        self.target, self.options, self.seconds = target, options, seconds
        self.worker: WorkerProcess | None = None

    def call(self, method: str | None, /, *args: object, **named: object) -> object:
        if "timeout" in named:  # an argument of `WorkerProcess.call` itself
            raise HostFailure("an argument cannot be called 'timeout' here", raised=True)
        try:
            if self.worker is None or not self.worker.alive:
                self.worker = WorkerProcess(self.target, memory_mb=None, made_with=self.options)
            return self.worker.call(method, *args, timeout=self.seconds, **named)
        except OSError as error:
            raise HostFailure(f"no process could be started: {error}", raised=False) from None
        except WorkerFailure as failure:
            words = failure.message if failure.kind == "raised" else f"{failure.kind}: {failure.message}"
            raise HostFailure(words[:LONGEST_REASON], failure.kind == "raised") from None

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
