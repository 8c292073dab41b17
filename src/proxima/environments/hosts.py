"""Where the code of an environment or a tool runs: in this process, or in one that can be killed."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from proxima.core.json_record import RecordView
from proxima.rewards import ATTRIBUTES, WorkerFailure, WorkerProcess, public_attributes, run_async

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
        """What a method returns, or, for None, the function; a `HostFailure` where it does not. For
        `ATTRIBUTES`, what `public_attributes` says of the object."""

    def cancel(self) -> None:
        """Make a call that waits in another thread fail soon."""

    def close(self) -> None:
        """Let go of the object, after its own `close` where it has one; what that raises is ignored."""


class LocalHost:
    """In this process: for code that is trusted to return."""

    def __init__(self, target: Callable[..., object], options: RecordView, closes: bool = False):
        """
        Args:
            closes: whether the object has a method `close`.
        """
        self.target, self.options, self.closes = target, options, closes
        self.made: object = None

    def call(self, method: str | None, /, *args: object, **named: object) -> object:
        try:
            if method is not None and self.made is None:
                self.made = self.target(**self.options)
            if method == ATTRIBUTES:
                return public_attributes(self.made)
            function = self.target if method is None else getattr(self.made, method)
            returned = function(*args, **named)
            return run_async(returned) if inspect.isawaitable(returned) else returned
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's code may raise anything
            words = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
            raise HostFailure(words[:LONGEST_REASON], raised=True) from None

    def cancel(self) -> None:
        """No other thread waits for this process."""

    def close(self) -> None:
        if self.closes and self.made is not None:
            with contextlib.suppress(HostFailure):
                self.call("close")
        self.made = None


class TurnClock:
    """How many seconds the calls of one turn may still take together, in whichever process they run."""

    def __init__(self, seconds: float):
        self.seconds = self.left = seconds

    def restart(self) -> None:
        self.left = self.seconds


class WorkerHost:
    """In a process of its own, with limits on its memory and on the seconds of a turn."""

    def __init__(
        self,
        target: str | Callable[..., object],
        options: RecordView,
        clock: TurnClock,
        memory_mb: int,
        closes: bool = False,
    ):
        """
        Args:
            clock: of the episode; an import takes none of its time.
            memory_mb: address space; 0 = no limit.
            closes: whether the object has a method `close`.
        """
        self.target, self.options, self.closes = target, options, closes
        self.clock, self.memory_mb = clock, memory_mb
        self.worker: WorkerProcess | None = None

    def call(self, method: str | None, /, *args: object, **named: object) -> object:
        limit, left = f"the {self.clock.seconds:g} s of a turn", self.clock.left
        if left <= 0:  # the object is as it was, and can be called in the next turn
            raise HostFailure(f"timeout: not called, {limit} are over", raised=True)
        try:
            return self._call(method, args, named)
        except OSError as error:
            raise HostFailure(f"no process could be started: {error}", raised=False) from None
        except WorkerFailure as failure:
            words = failure.message if failure.kind == "raised" else f"{failure.kind}: {failure.message}"
            if failure.kind == "timeout" and not failure.at_start and left < self.clock.seconds:
                words = f"timeout: no answer within what was left of {limit}"
            raise HostFailure(words[:LONGEST_REASON], failure.kind == "raised") from None

    def _call(self, method: str | None, args: Sequence[object], named: RecordView) -> object:
        if self.worker is None or not self.worker.alive:
            self.worker = WorkerProcess(self.target, memory_mb=self.memory_mb or None, made_with=self.options)
        self.worker.start()
        began = time.monotonic()
        try:
            return self.worker.request(method, args, named, self.clock.left)
        finally:
            self.clock.left -= time.monotonic() - began

    def cancel(self) -> None:
        if self.worker is not None:
            self.worker.cancel()

    def close(self) -> None:
        if self.worker is not None and self.worker.alive:
            if self.closes:
                self.clock.restart()
                with contextlib.suppress(HostFailure):
                    self.call("close")
            self.worker.close()
