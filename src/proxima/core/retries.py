"""Retries: one policy for every call that is attempted more than once, synchronous or not.

Users' rewards and judges are called again at once; requests over HTTP wait with exponential backoff.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tenacity import RetryCallState

Result = TypeVar("Result")


@dataclass(frozen=True)
class RetryPolicy:
    """How often a call is attempted, and how long to wait between attempts.

    RetryPolicy(attempts=4, first_wait=0.5, longest_wait=60) waits 0.5, 1 and 2 s.
    """

    attempts: int = 1
    """In all, the first included; a caller with a deadline of its own asks only for `wait`."""
    first_wait: float = 0.0
    """Seconds after the first failure; doubled after each further one."""
    longest_wait: float = 0.0
    jitter: float = 0.0
    """Largest share of a wait that is left out at random, so that many clients do not come back at once."""

    def wait(self, failures: int, requested: float = 0.0) -> float:
        """Seconds before the next attempt.

        Args:
            failures: attempts so far, at least 1.
            requested: what the server asked for; only `longest_wait` overrules it.
        """
        share = random.uniform(1 - self.jitter, 1.0) if self.jitter else 1.0
        backoff = self.first_wait * 2.0 ** min(failures - 1, 64) * share
        return min(self.longest_wait, max(backoff, requested))

    def call(
        self,
        work: Callable[[], Result],
        should_retry: Callable[[BaseException], bool],
        on_retry: Callable[[BaseException], None],
    ) -> Result:
        """What `work` returns, or the error of the last attempt.

        Args:
            should_retry: whether another attempt may help after this error.
            on_retry: called before each further attempt, with the error.
        """
        import tenacity

        def log_failure(state: RetryCallState) -> None:
            on_retry(_error_of(state))

        return tenacity.Retrying(**self._settings(should_retry), before_sleep=log_failure)(work)

    async def call_async(
        self, work: Callable[[], Awaitable[Result]], should_retry: Callable[[BaseException], bool]
    ) -> Result:
        """The same of a coroutine function."""
        import tenacity

        return await tenacity.AsyncRetrying(**self._settings(should_retry))(work)

    def _settings(self, should_retry: Callable[[BaseException], bool]) -> dict[str, Any]:
        import tenacity

        def wait(state: RetryCallState) -> float:
            return self.wait(state.attempt_number, getattr(_error_of(state), "requested_wait", 0.0))

        return {
            "stop": tenacity.stop_after_attempt(self.attempts),
            "wait": wait,
            "retry": tenacity.retry_if_exception(should_retry),
            "reraise": True,
        }


def _error_of(state: RetryCallState) -> BaseException:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert error is not None
    return error
