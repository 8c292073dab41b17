"""A call of a user's code, a reward or a judge, that may fail and is then tried again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from proxima.rewards.reward_outcome import Outcome, in_one_line

log = logging.getLogger(__name__)


def attempt(ask: Callable[[], Outcome], count: int, attempts: int, name: str) -> Outcome:
    """What the first call returned that did not raise; after `attempts` calls all `count` samples are nan.

    Args:
        name: who is asked, for the log.
    """
    outcome = Outcome.failed(count, "")
    for number in range(1, attempts + 1):
        try:
            return ask()
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            outcome = Outcome.failed(count, in_one_line(error))
            if number < attempts:
                log.warning("%s failed and is tried again: %s", name, outcome.reason)
    return outcome
