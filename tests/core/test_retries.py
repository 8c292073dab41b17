"""Retries: how often, how long in between, and for which errors; and that they are in one place."""

import asyncio
import random
from pathlib import Path

import pytest

from proxima.core.retries import RetryPolicy

SOURCE = Path(__file__).parents[2] / "src" / "proxima"


class BusyError(Exception):
    def __init__(self, requested_wait=0.0):
        super().__init__("busy")
        self.requested_wait = requested_wait


def failing(times, error=BusyError):
    """A call that fails so often, then returns how often it was called."""
    calls = []

    def call():
        calls.append(1)
        if len(calls) <= times:
            raise error()
        return len(calls)

    return call


def test_waits_double_up_to_the_longest():
    policy = RetryPolicy(first_wait=0.5, longest_wait=10.0)
    assert [policy.wait(failures) for failures in (1, 2, 3, 5, 6, 10_000)] == [0.5, 1, 2, 8, 10, 10]


def test_a_server_may_ask_for_longer_but_not_for_more_than_the_longest():
    policy = RetryPolicy(first_wait=0.5, longest_wait=10.0, jitter=0.5)
    assert policy.wait(1, requested=7.0) == 7.0
    assert policy.wait(1, requested=1e9) == 10.0


def test_jitter_shortens_a_wait_by_at_most_its_share():
    waits = [RetryPolicy(first_wait=1.0, longest_wait=10.0, jitter=0.5).wait(1) for _ in range(500)]
    assert 0.5 <= min(waits) < 0.6
    assert 0.9 < max(waits) <= 1.0


def test_without_jitter_the_global_random_state_is_left_alone():
    before = random.getstate()
    RetryPolicy(first_wait=1.0, longest_wait=2.0).wait(3)
    assert random.getstate() == before


@pytest.mark.parametrize(("attempts", "failures"), [(1, 0), (2, 1), (4, 3)])
def test_a_call_is_attempted_until_it_succeeds(attempts, failures):
    seen = []
    policy = RetryPolicy(attempts)
    assert policy.call(failing(failures), lambda error: True, seen.append) == failures + 1
    assert [type(error) for error in seen] == [BusyError] * failures


def test_the_last_error_is_raised_as_it_is_and_no_retry_is_announced_for_it():
    seen = []
    with pytest.raises(BusyError):
        RetryPolicy(2).call(failing(2), lambda error: True, seen.append)
    assert len(seen) == 1


def test_an_error_that_a_retry_cannot_help_is_raised_at_once():
    call = failing(1, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        RetryPolicy(5).call(call, lambda error: isinstance(error, Exception), lambda error: None)
    assert call() == 2


def test_coroutines_are_retried_too_and_wait_as_long_as_the_server_asks(monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    call = failing(3, lambda: BusyError(requested_wait=3.0))

    async def work():
        return call()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    policy = RetryPolicy(4, first_wait=1.0, longest_wait=3.5)
    assert asyncio.run(policy.call_async(work, lambda error: isinstance(error, BusyError))) == 4
    assert waits == [3.0, 3.0, 3.5]


def test_retries_are_in_one_place():
    users = [path.name for path in SOURCE.rglob("*.py") if "import tenacity" in path.read_text()]
    assert users == ["retries.py"]
