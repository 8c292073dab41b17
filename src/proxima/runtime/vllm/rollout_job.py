"""What is asked of an engine and what it answers.

In: prompts as ids, seeds, a version of the policy. Out: checked answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from proxima.core.sampling import Sampling

ROUNDING = 1e-3  # by how much a log-probability may be above 0


@dataclass(frozen=True)
class Version:
    """The policy as it was after some update: a folder under a name that is never used again."""

    number: int
    name: str
    folder: Path
    digest: str
    adapter: bool
    """A LoRA adapter in PEFT's format; else all weights."""


@dataclass(frozen=True)
class Probe:
    """A text and what the training side thinks of it: an engine must think the same before it is sampled
    from."""

    ids: list[int]
    logprobs: list[float]  # of ids[1:], temperature 1, whole vocabulary
    tolerance: float  # of the mean difference

    def check(self, found: Sequence[float], sampled: float) -> None:
        """
        Args:
            found: the engine's log-probabilities of ids[1:].
            sampled: what it says of a token sampled with top_k 1; over the one token that was kept, that is
                0.
        """
        if len(found) != len(self.logprobs) or not all(map(math.isfinite, found)):
            raise WrongAnswer(
                f"{len(self.logprobs)} log-probabilities were asked for, {len(found)} came, or some are no "
                "numbers"
            )
        gap = sum(abs(ours - theirs) for ours, theirs in zip(self.logprobs, found, strict=True)) / len(found)
        if not gap <= self.tolerance:
            raise WrongAnswer(
                "it has another model or other weights: its log-probabilities differ from the training "
                f"side's by {gap:.3g} "
                f"a token (at most {self.tolerance:g} is rounding)"
            )
        if not abs(sampled) <= ROUNDING:
            raise WrongAnswer(
                "its log-probabilities leave out top_k; start it with --logprobs-mode processed_logprobs"
            )


@dataclass(frozen=True)
class Job:
    """One response a row."""

    rows: list[list[int]]  # prompt ids, no padding
    seeds: list[int]  # of each row: what it samples does not depend on who answers
    sampling: Sampling
    vocabulary: int


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    logprobs: list[float]

    def ended(self, eos_ids: Sequence[int]) -> bool:
        return self.ids[-1] in eos_ids


class WrongAnswer(Exception):  # noqa: N818
    """An answer that cannot be one."""


class Engine(Protocol):
    """What samples. Versions come in order; the two newest may be asked for."""

    retries: int
    """Rows asked for again, so far."""

    def use(self, version: Version, probe: Probe) -> None: ...
    def sample(self, job: Job, version: Version) -> Future[list[Answer]]: ...
    def drop(self, version: Version) -> None: ...


def read_answer(ids: Any, logprobs: Any, job: Job) -> Answer:
    """The answer to one row, as the built-in engine would give it: at most one EOS, and that last; or
    `WrongAnswer`."""
    limit, ends = job.sampling.max_new_tokens, job.sampling.eos_ids
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise WrongAnswer("no list of token ids")
    if not 1 <= len(ids) <= limit:
        raise WrongAnswer(f"{len(ids)} tokens where 1 to {limit} were asked for")
    if strange := [token for token in ids if not 0 <= token < job.vocabulary]:
        raise WrongAnswer(f"token id {strange[0]} of a vocabulary of {job.vocabulary}")
    if any(token in ends for token in ids[:-1]) or (len(ids) < limit and ids[-1] not in ends):
        raise WrongAnswer("a response that does not stop where it must")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        raise WrongAnswer("not one log-probability a token")
    if not all(
        type(number) in (int, float) and math.isfinite(number) and number <= ROUNDING for number in logprobs
    ):
        raise WrongAnswer("log-probabilities that are none")
    return Answer(ids, [float(number) for number in logprobs])
