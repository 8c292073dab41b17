"""Ready-made rewards, chosen by name: each checks its options and returns a pure function of the responses
with a stated range."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MATCH_CHARACTERS = 20_000  # of a longer response only the start is matched
MATCH_SECONDS = 1.0  # a response on which the pattern takes longer fails

RewardFunction = Callable[..., list[float] | list[float | None]]


def length_band(*, low: int, high: int) -> RewardFunction:
    """0 to 1: 1 for `low` to `high` response tokens (EOS included), falling linearly to 0 at no tokens and at
    twice `high`."""
    if not 0 <= low <= high or high < 1:
        raise ValueError(f"length_band needs 0 <= low <= high and high >= 1, got low={low}, high={high}")

    def score(
        prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[float]:
        return [in_band(len(ids), low, high) for ids in completion_ids]

    return score


def in_band(length: int, low: int, high: int) -> float:
    if length < low:
        return length / low
    return max(0.0, 1 - max(0, length - high) / high)


def regex(*, pattern: str, mode: str = "search") -> RewardFunction:
    """1 where the pattern matches the response (`search`: anywhere; `fullmatch`: all of it), else 0."""
    import regex as engine  # as `re`, with a time limit

    if mode not in ("search", "fullmatch"):
        raise ValueError(f"the mode of a regex ({mode!r}) must be search or fullmatch")
    try:
        compiled = engine.compile(pattern)
    except engine.error as error:
        raise ValueError(f"the regex {pattern!r} is not a pattern: {error}") from None
    find = getattr(compiled, mode)

    def matches(text: str) -> float | None:
        try:
            return float(find(text[:MATCH_CHARACTERS], timeout=MATCH_SECONDS) is not None)
        except TimeoutError:
            return None

    def score(prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
        return [matches(text) for text in completions]

    return score


def repetition(*, n: int = 3) -> RewardFunction:
    """-1 to 0: minus the share of a response's token n-grams that repeat earlier ones; 0 below n tokens."""
    if n < 1:
        raise ValueError(f"the n of repetition ({n}) must be at least 1")

    def score(
        prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[float]:
        return [-repeated_share(ids, n) for ids in completion_ids]

    return score


def repeated_share(ids: Sequence[int], n: int) -> float:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def ends_with_eos() -> RewardFunction:
    """1 where the response is finished (it ends with EOS), 0 where it was cut off."""

    def score(prompts: Sequence[str], completions: Sequence[str], ended: Sequence[bool]) -> list[float]:
        return [float(end) for end in ended]

    return score


READY_MADE: dict[str, Callable[..., RewardFunction]] = {
    maker.__name__: maker for maker in (length_band, regex, repetition, ends_with_eos)
}
