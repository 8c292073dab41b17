"""One call of a reward that may raise anything, or never return. In: a reward, samples. Out: its outcome; nan
and the reason where it raised or took too long."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from proxima.rewards import RewardOutcome, Samples, call_with_retries

log = logging.getLogger(__name__)

WAITED, LIMIT = 30.0, 300.0  # seconds after which a call is spoken of, and given up
HANGS = "it did not return within"


def call_reward(score: Callable[[Samples], RewardOutcome], samples: Samples) -> RewardOutcome:
    """The outcome of one attempt."""

    def attempt() -> RewardOutcome:
        with limited():
            return score(samples)

    return call_with_retries(attempt, len(samples), 1, lambda reason: None)


@contextmanager
def limited() -> Iterator[None]:
    """Raises TimeoutError in what runs longer than `LIMIT`, where a signal can: in the main thread, not on
    Windows."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    rang = False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rang
        if rang:
            raise TimeoutError(f"{HANGS} {LIMIT:g} s")
        rang = True
        log.warning(
            "a reward has not returned for %g s; it has %g s in all, and Ctrl-C ends the doctor",
            WAITED,
            LIMIT,
        )

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, WAITED, LIMIT - WAITED)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
