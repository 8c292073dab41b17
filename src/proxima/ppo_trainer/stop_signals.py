"""`StopSignals`: which signals (Ctrl-C, SIGTERM, …) end a run after its step, and what is said then.

In: signals. Out: a note for the loop, which ends its step first.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from proxima.runtime.distributed import rank_and_count, started_by_torchrun

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopSignals:
    """The first signal is noted; Ctrl-C after it stops at once. Outside the main thread signals stay as they
    are.

    Under torchrun, which passes on what the terminal has sent already, more of them change nothing: it kills
    by itself those that take longer than its --shutdown-timeout.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, signal._HANDLER] = {}

    @property
    def name(self) -> str:
        return NAMES[signal.Signals(self.received)]

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received and number == signal.SIGINT and not started_by_torchrun():
            raise KeyboardInterrupt
        if not self.received:
            self.received = number
            # not print: the signal may have come in the middle of one
            if rank_and_count()[0] == 0:
                more = "" if started_by_torchrun() else "; Ctrl-C stops at once"
                os.write(2, f"\n{self.name}: finishing this step, then a checkpoint{more}\n".encode())

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in NAMES}
        return self

    def __exit__(self, *problem: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
