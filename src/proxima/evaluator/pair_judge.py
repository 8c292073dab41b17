"""Judges that compare two answers directly: each pair is asked in both orders and averaged, so that a liking
for one place cancels. In: prompts and two answers each. Out: the probability that the first is better, nan
where the judge failed.

Python   f(prompts, ours, theirs)  ->  one entry per prompt: 1, 0 or -1 (better, tie, worse), or a
         probability (any float)
HTTP     POST {"prompts": [...], "first": [...], "second": [...], "columns": {...}}
         ->  {"choices": [1, 0, -1, null, ...]}  or  {"preferences": [0.8, null, ...]}: for the first
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import ClassVar

from proxima.config import RewardSpec
from proxima.rewards import (
    ChatReward,
    EndpointReward,
    RewardOutcome,
    Samples,
    UnusableReply,
    call_with_retries,
    check_options,
    keyword_options,
    load_function,
    require_options,
    run_async,
    typed,
)

log = logging.getLogger(__name__)

NAMES = ("ours", "theirs")  # a function that takes both compares; any other scores, as a reward does
SCORES = "score"  # option of a URL that scores each answer separately


@dataclass(frozen=True)
class Pairs(Samples):
    """Two answers per prompt."""

    seconds: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> Pairs:
        nothing: list[list[int]] = [[] for _ in prompts]
        return cls(list(prompts), list(first), nothing, [True] * len(nothing), seconds=list(second))

    def part(self, start: int, stop: int) -> Pairs:
        return Pairs.of(self.prompts[start:stop], self.completions[start:stop], self.seconds[start:stop])


class PairJudge:
    """Asks in both orders; no failure is ever replaced by a number."""

    def __init__(self, label: str, ask: Callable[[Pairs], RewardOutcome], attempts: int):
        self.label, self._ask, self._attempts = label, ask, attempts
        self.last_failure = ""

    def check(self, prompts: Sequence[str]) -> None:
        """A ValueError where the judge asks for a column that the prompts lack."""
        if isinstance(self._ask, ChatReward):
            self._ask.check(prompts)

    def compare(self, prompts: Sequence[str], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        """The preference for ours, one per prompt. Equal answers are a tie and nobody is asked."""
        asked = [i for i in range(len(prompts)) if ours[i] != theirs[i]]
        result = [0.5] * len(prompts)
        if asked:
            chosen = [[column[i] for i in asked] for column in (prompts, ours, theirs)]
            asked_prompts, own, other = chosen
            forth = self._try(Pairs.of(asked_prompts, own, other))
            back = self._try(Pairs.of(asked_prompts, other, own))
            for i, first, second in zip(asked, forth, back, strict=True):
                result[i] = (first + 1 - second) / 2
        return result

    def keep_in(self, folder: Path) -> None:
        if isinstance(self._ask, ChatReward):
            self._ask.keep_in(folder)

    def _try(self, pairs: Pairs) -> list[float]:
        def warn(reason: str) -> None:
            log.warning("judge %s failed; retrying: %s", self.label, reason)

        outcome = call_with_retries(lambda: self._ask(pairs), len(pairs), self._attempts, warn)
        if outcome.failures:
            self.last_failure = f"{self.label}: {outcome.reason}"
            log.warning(
                "judge failed for %d of %d pairs: %s", outcome.failures, len(pairs), self.last_failure
            )
        return outcome.sequence


class EndpointJudge(EndpointReward):
    """A judge behind HTTP, with the requests, retries and time limits of a reward behind HTTP."""

    def _body(self, part: Samples) -> bytes:
        assert isinstance(part, Pairs)
        body = json.loads(super()._body(part))
        del body["ended"]
        return json.dumps({"first": body.pop("completions"), "second": part.seconds, **body}).encode()

    def _read(self, reply: bytes, part: Samples) -> RewardOutcome:
        try:
            answer = json.loads(reply)
            kind = next(kind for kind in ("choices", "verdicts", "preferences") if kind in answer)
            entries = answer[kind]
            signs = kind != "preferences"  # `verdicts` is the older name of choices
        except (ValueError, TypeError, StopIteration, RecursionError):
            raise UnusableReply(
                'the reply is not JSON of the form {"choices": [...]} or {"preferences": [...]}'
            ) from None
        try:
            return read_preferences(entries, len(part), signs)
        except ValueError as error:
            raise UnusableReply(str(error)) from None


class ChatJudge(ChatReward):
    """A language model that compares two answers."""

    task = "You compare two answers to a prompt and say which one is better: first, second or tie."
    field = "better"
    allowed: ClassVar[Mapping[int | str, float]] = {"first": 1.0, "tie": 0.5, "second": 0.0}

    def _data(self, part: Samples) -> dict[str, str]:
        assert isinstance(part, Pairs)
        data = super()._data(part)
        return {"prompt": data.pop("prompt"), "first": data.pop("answer"), "second": part.seconds[0], **data}


def open_pair_judge(spec: RewardSpec) -> PairJudge | None:
    """The judge, where this one compares; None where it scores each answer separately."""
    if spec.is_http:
        kind: type[EndpointReward] = ChatJudge if spec.is_chat else EndpointJudge
        accepted = {name: each for name, each in keyword_options(kind).items() if name != "send_ids"}
        options = check_options(spec, {**accepted, SCORES: bool})
        if options.pop(SCORES, False):
            return None
        require_options(spec, kind)
        return PairJudge(spec.label, kind(str(spec.source), **options), kind.attempts)
    if not spec.is_function:
        return None
    function = spec.source if callable(spec.source) else load_function(spec.source)
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # some builtins have no signature
        return None
    if not set(NAMES) <= set(parameters):
        return None
    own = ("prompts", *NAMES)
    options = check_options(spec, typed(function, [name for name in parameters if name not in own]))
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in options
    ]
    if set(needed) != set(own):
        raise ValueError(
            f"the judge {spec.label!r} must take (prompts, ours, theirs), it takes ({', '.join(needed)})"
        )

    def ask(pairs: Pairs) -> RewardOutcome:
        given = {
            "prompts": list(pairs.prompts),
            "ours": list(pairs.completions),
            "theirs": list(pairs.seconds),
        }
        returned = function(**given, **options)
        if inspect.isawaitable(returned):
            returned = run_async(returned)
        return read_preferences(returned, len(pairs))

    return PairJudge(spec.label, ask, attempts=2)


def as_reward(spec: RewardSpec) -> RewardSpec:
    """The spec of a judge that scores, as rewards have it."""
    options = {name: value for name, value in spec.options.items() if name != SCORES or not spec.is_http}
    return RewardSpec(spec.source, spec.weight, spec.label, options)


def read_preferences(returned: object, count: int, signs: bool | None = None) -> RewardOutcome:
    """Each entry separately; anything else than a choice or a probability is nan.

    Args:
        signs: whether entries are choices (1, 0, -1) or probabilities; None = integers are choices,
            True and False say whether the first is better, and all else are probabilities.
    """
    entries = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"it returned a {type(returned).__name__}, not a list of {count} preferences")
    if len(entries) != count:
        raise ValueError(f"it returned {len(entries)} preferences for {count} pairs")
    numbers = [_preference(entry, signs) for entry in entries]
    bad = next((entry for entry, number in zip(entries, numbers, strict=True) if math.isnan(number)), None)
    shown = bad if bad is None or isinstance(bad, (bool, float)) else f"a {type(bad).__name__}"
    reason = (
        f"neither a choice (1, 0, -1) nor a probability but {shown}" if any(map(math.isnan, numbers)) else ""
    )
    return RewardOutcome(numbers, {}, reason)


def _preference(entry: object, signs: bool | None) -> float:
    if not isinstance(entry, Real) or (isinstance(entry, bool) and signs is not None):
        return math.nan
    if signs or (signs is None and isinstance(entry, Integral) and not isinstance(entry, bool)):
        return (float(entry) + 1) / 2 if entry in (-1, 0, 1) else math.nan
    return float(entry) if 0 <= float(entry) <= 1 else math.nan  # nan fails too
