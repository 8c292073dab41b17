"""What a reward returned, read strictly.

In: numbers, lists of numbers, None. Out: `Outcome`; nothing is ever imputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

NAN = float("nan")
LARGEST = 3.4e38  # above it float32, in which losses are computed, has no number
LONGEST_REASON = 300  # characters


@dataclass(frozen=True)
class Outcome:
    """One reward of a batch."""

    sequence: list[float]  # one per sequence: nan where it failed, 0 where the reward is per token
    token: dict[int, list[float]]  # by sequence, one number per response token
    reason: str = ""  # why the last of the failed ones failed

    @classmethod
    def failed(cls, count: int, reason: str) -> Outcome:
        return cls([NAN] * count, {}, reason)

    @staticmethod
    def join(parts: Sequence[Outcome]) -> Outcome:
        """Of the parts of a batch, in order."""
        sequence: list[float] = []
        token: dict[int, list[float]] = {}
        for part in parts:
            token |= {len(sequence) + i: row for i, row in part.token.items()}
            sequence += part.sequence
        return Outcome(sequence, token, next((part.reason for part in reversed(parts) if part.reason), ""))

    @property
    def failures(self) -> int:
        return sum(map(math.isnan, self.sequence))

    @property
    def totals(self) -> list[float]:
        """One number per sequence: per-token rewards added up."""
        return [number + math.fsum(self.token.get(i, ())) for i, number in enumerate(self.sequence)]


def read_rewards(returned: Any, lengths: Sequence[int], booleans: bool = True) -> Outcome:
    """Each entry by itself: a finite number, or as many as the response has tokens; anything else is nan.

    Args:
        returned: list, tuple, array or tensor with one entry a sequence.
        lengths: response tokens of each sequence.
        booleans: whether True and False are the numbers 1 and 0.
    """
    entries = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"it returned a {type(returned).__name__}, not a list of {len(lengths)} numbers")
    if len(entries) != len(lengths):
        raise ValueError(f"it returned {len(entries)} rewards for {len(lengths)} sequences")
    sequence, token, reason = [], {}, ""
    for i, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
        number, row = NAN, entry.tolist() if hasattr(entry, "tolist") else entry
        if isinstance(row, (list, tuple)):
            numbers = [_number(item, booleans) for item in row]
            if len(row) != length:
                reason = f"{len(row)} rewards for the {length} tokens of a response"
            elif any(map(math.isnan, numbers)):
                reason = "a token's reward is not a finite number"
            else:
                number, token[i] = 0.0, numbers
        else:
            number = _number(row, booleans)
            reason = f"not a finite number but {_named(row)}" if math.isnan(number) else reason
        sequence.append(number)
    return Outcome(sequence, token, reason)


def _number(value: Any, booleans: bool) -> float:
    """A finite number, or nan."""
    if not isinstance(value, Real) or (isinstance(value, bool) and not booleans):
        return NAN
    try:
        number = float(value)
    except OverflowError:
        return NAN
    return number if abs(number) <= LARGEST else NAN  # nan fails too


def attempt(
    ask: Callable[[], Outcome], count: int, attempts: int, say_again: Callable[[str], None]
) -> Outcome:
    """What a reward or a judge answers. A call that raises is tried again, up to `attempts` calls in all;
    then all `count` samples are nan.

    Args:
        say_again: called with the reason before a call is tried again.
    """
    outcome = Outcome.failed(count, "")
    for number in range(1, attempts + 1):
        try:
            return ask()
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            outcome = Outcome.failed(count, in_one_line(error))
            if number < attempts:
                say_again(outcome.reason)
    return outcome


def in_one_line(error: BaseException) -> str:
    """What was raised, for a message: short, whatever a user's code wrote."""
    words = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return words if len(words) <= LONGEST_REASON else f"{words[:LONGEST_REASON]} …"


def _named(value: Any) -> str:
    """A failed entry for a message: short, and no text of a stranger's."""
    return str(value) if value is None or isinstance(value, (bool, float)) else f"a {type(value).__name__}"
