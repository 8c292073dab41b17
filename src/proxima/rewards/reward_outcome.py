"""What a reward returned, read strictly as a `RewardOutcome`: anything but a finite number becomes nan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real

from proxima.core.retries import RetryPolicy

NAN = float("nan")
LARGEST = 3.4e38  # float32, in which losses are computed, holds no larger number
MAX_REASON = 300  # characters
MOST_REASONS = 3  # that one line says


@dataclass(frozen=True)
class RewardOutcome:
    """One reward source's rewards of a batch."""

    sequence: list[float]  # one reward per sequence: nan where it failed, 0 where rewards are per-token
    token: dict[int, list[float]]  # per-token rewards, by sequence
    reason: str = ""  # why sequences failed
    spread: list[float] | None = None  # of an ensemble, how far its heads are apart, by sequence
    failed_programs: dict[int, str] = field(default_factory=dict)  # those that score 0 for it, and why

    @classmethod
    def failed(cls, count: int, reason: str) -> RewardOutcome:
        return cls([NAN] * count, {}, reason)

    @staticmethod
    def join(parts: Sequence[RewardOutcome]) -> RewardOutcome:
        """The outcome of a batch from those of its parts, in order."""
        sequence: list[float] = []
        token: dict[int, list[float]] = {}
        for part in parts:
            token |= {len(sequence) + i: row for i, row in part.token.items()}
            sequence += part.sequence
        return RewardOutcome(
            sequence, token, next((part.reason for part in reversed(parts) if part.reason), "")
        )

    @property
    def failures(self) -> int:
        return sum(map(math.isnan, self.sequence))

    @property
    def totals(self) -> list[float]:
        """One number per sequence: per-token rewards are summed."""
        return [number + math.fsum(self.token.get(i, ())) for i, number in enumerate(self.sequence)]


def call_with_retries(
    source: Callable[[], RewardOutcome], count: int, attempts: int, on_retry: Callable[[str], None]
) -> RewardOutcome:
    """The outcome of a user's reward or judge; all `count` entries are nan where every attempt raises.

    Args:
        on_retry: called with the reason before each further attempt.
    """
    try:
        return RetryPolicy(attempts).call(
            source,
            should_retry=lambda error: isinstance(error, (Exception, SystemExit)),
            on_retry=lambda error: on_retry(in_one_line(error)),
        )
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        return RewardOutcome.failed(count, in_one_line(error))


def read_rewards(returned: object, lengths: Sequence[int], booleans: bool = True) -> RewardOutcome:
    """Each entry separately: a finite number, or one number per response token; anything else is nan.

    Args:
        returned: list, tuple, array or tensor with one entry per sequence.
        lengths: response tokens of each sequence.
        booleans: whether True and False are the numbers 1 and 0.
    """
    entries = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"it returned a {type(returned).__name__}, not a list of {len(lengths)} numbers")
    if len(entries) != len(lengths):
        raise ValueError(f"it returned {len(entries)} rewards for {len(lengths)} sequences")
    sequence: list[float] = []
    token: dict[int, list[float]] = {}
    reason = ""
    for i, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
        number = NAN
        row = entry.tolist() if hasattr(entry, "tolist") else entry
        if isinstance(row, (list, tuple)):
            numbers = [_number(item, booleans) for item in row]
            if len(row) != length:
                reason = f"{len(row)} rewards for the {length} tokens of a response"
            elif any(map(math.isnan, numbers)):
                reason = "a token's reward is not a finite number"
            else:
                number = 0.0
                token[i] = numbers
        else:
            number = _number(row, booleans)
            reason = f"not a finite number but {_named(row)}" if math.isnan(number) else reason
        sequence.append(number)
    return RewardOutcome(sequence, token, reason)


def _number(value: object, booleans: bool) -> float:
    """A finite number, or nan."""
    if not isinstance(value, Real) or (isinstance(value, bool) and not booleans):
        return NAN
    try:
        number = float(value)
    except OverflowError:
        return NAN
    return number if abs(number) <= LARGEST else NAN  # nan fails too


def in_one_line(error: BaseException) -> str:
    """An error as one short line, whatever a user's code wrote into it."""
    words = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return words if len(words) <= MAX_REASON else f"{words[:MAX_REASON]} …"


def counted(reasons: Sequence[str]) -> str:
    """Different reasons in one line, the most frequent first: `3 x timeout: ...; 1 x KeyError: ...`."""
    found = Counter(reasons).most_common()
    if len(reasons) == 1:
        return reasons[0]
    length = MAX_REASON // max(1, min(len(found), MOST_REASONS))
    told = [
        f"{count} x {reason if len(reason) <= length else reason[:length] + ' …'}"
        for reason, count in found[:MOST_REASONS]
    ]
    rest = sum(count for _, count in found[MOST_REASONS:])
    return "; ".join([*told, *([f"{rest} x others"] if rest else [])])


def _named(value: object) -> str:
    """A failed entry for a message: short, without text from outside."""
    return str(value) if value is None or isinstance(value, (bool, float)) else f"a {type(value).__name__}"
