"""Verifiable rewards by name: `math`, `code`, `json_schema`, `choice`, `reasoning_gym:NAME`.

Each compares an answer with what a column of the data says is right. References are checked before a run:
one that cannot grade would always score 0. Each knows constant answers, so that a reward which one of them
wins is seen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from math import isnan
from statistics import fmean
from typing import Any, NamedTuple

from proxima.config import GYM_PREFIX, RewardSpec
from proxima.core.regular_files import read_given
from proxima.rewards import code_tests, graders
from proxima.rewards.gym_generators import check_generator
from proxima.rewards.reward_options import check_options, keyword_options
from proxima.rewards.reward_outcome import NAN, RewardOutcome
from proxima.rewards.reward_samples import Columns, Samples, columns_of
from proxima.rewards.worker_pool import MEMORY_MB, TIMEOUT, WorkerPool, summarize
from proxima.rewards.worker_process import JsonValue, WorkerFailure

TRIED = 64  # prompts on which constant answers are scored
COMMON = 3  # most frequent references that are tried as constant answers
TRIVIAL = ("", "0", "1")
CODE_MEMORY_MB = 1024


class BestConstant(NamedTuple):
    """The answer that, given to every prompt, scores best, and its mean score."""

    answer: str
    score: float


class VerifierReward:
    """Grades answers by a column of the data, in worker processes."""

    attempts = 1  # the pool retries each sample itself
    lacks_unit = False

    def __init__(
        self,
        label: str,
        columns: Sequence[str],
        grade: WorkerPool | Callable[..., float],
        complain: WorkerPool | Callable[[Any], str],
        *,
        constants: Sequence[str] = (),
        references_are_answers: bool = True,
        reference_of: Callable[[Columns], JsonValue] | None = None,
        checked_of: Callable[[Columns], JsonValue] | None = None,
        failed: float = NAN,
    ):
        """
        Args:
            columns: of the data, that a reference is made of.
            grade: (completion, reference) -> score; a pool for what may hang.
            complain: reference -> why it cannot grade, or nothing.
            constants: answers to try besides the most frequent references and the trivial ones.
            references_are_answers: where they are not, `constants` alone are tried.
            reference_of: from a row's columns; the first one by default.
            checked_of: what `complain` is given in place of the reference.
            failed: score of an answer on which the grader hangs or crashes; nan where it raises.
        """
        self.label, self.columns = label, columns
        self._grade, self._complain, self._failed = grade, complain, failed
        self.runs_programs = not isnan(failed)
        self._constants, self._are_answers = constants, references_are_answers
        self._reference_of = reference_of or (lambda row: row[columns[0]])
        self._checked_of = checked_of or self._reference_of
        self._checked: set[str] = set()

    def check(self, prompts: Sequence[str], first: int = 0) -> None:
        """Raise a ValueError that names the first row whose reference is missing or cannot grade."""
        for number, prompt in enumerate(prompts):
            if lacking := [name for name in self.columns if name not in columns_of(prompt)]:
                have = ", ".join(sorted(columns_of(prompt))) or "none"
                raise ValueError(
                    f"the reward {self.label!r} needs the column {lacking[0]!r}, but the columns of prompt "
                    f"{first + number} ({prompt[:40]!r}) are: {have}"
                )
        references = [self._checked_of(columns_of(prompt)) for prompt in prompts]
        keys = [json.dumps(reference, sort_keys=True, default=str) for reference in references]
        new = {key: number for number, key in reversed(list(enumerate(keys))) if key not in self._checked}
        rows = sorted(new.values())
        complaints = _run(self._complain, [(references[row],) for row in rows])
        for row, complaint in zip(rows, complaints, strict=True):
            if complaint:
                raise ValueError(
                    f"the reward {self.label!r} cannot use the reference of prompt {first + row} "
                    f"({prompts[row][:40]!r}), {keys[row][:80]}: {_in_words(complaint)}"
                )
            self._checked.add(keys[row])
        if isinstance(self._complain, WorkerPool):
            self._complain.close()

    def __call__(self, samples: Samples) -> RewardOutcome:
        references = [self._reference(prompt) for prompt in samples.prompts]
        replies = _run(self._grade, list(zip(samples.answers, references, strict=True)))
        scores = [self._score(reply) for reply in replies]
        failed = {row: reply for row, reply in enumerate(replies) if isinstance(reply, (WorkerFailure, str))}
        lost = [
            each for row, each in failed.items() if isnan(scores[row]) and isinstance(each, WorkerFailure)
        ]
        programs = {row: _in_words(each) for row, each in failed.items() if not isnan(scores[row])}
        return RewardOutcome(scores, {}, summarize(lost), failed_programs=programs)

    def _score(self, reply: JsonValue | WorkerFailure) -> float:
        """A text says why a program came to no end."""
        if isinstance(reply, WorkerFailure):
            return NAN if reply.at_start or reply.kind == "raised" else self._failed
        return self._failed if isinstance(reply, str) else float(reply)

    def _reference(self, prompt: str) -> JsonValue:
        return self._reference_of(columns_of(prompt))

    def best_constant(self, prompts: Sequence[str]) -> BestConstant:
        """Among the most frequent references and a few trivial answers, over some of these prompts."""
        prompts = prompts[:: max(1, len(prompts) // TRIED)]
        texts = [str(columns_of(prompt)[name]) for prompt in prompts for name in self.columns[:1]]
        frequent = [graders.math_reference(text) for text, _ in Counter(texts).most_common(COMMON)]
        usual = (*frequent, *TRIVIAL) if self._are_answers else ()
        answers = dict.fromkeys((*usual, *self._constants))
        count = len(prompts)
        nothing: list[list[int]] = [[] for _ in prompts]
        scores = {
            answer: self(Samples(list(prompts), [answer] * count, nothing, [True] * count)).sequence
            for answer in answers
        }
        known = {
            answer: [score for score in each if not isnan(score)] or [0.0] for answer, each in scores.items()
        }
        best = max(known, key=lambda answer: fmean(known[answer]))
        return BestConstant(best, fmean(known[best]))


def _in_words(failure: WorkerFailure | str) -> str:
    return failure if isinstance(failure, str) else f"{failure.kind}: {failure.message}"


def _run(work: WorkerPool | Callable[..., object], calls: Sequence[tuple[object, ...]]) -> list[Any]:
    """The replies to these calls; a failure of a check is a complaint too, because it is not an empty
    text."""
    if isinstance(work, WorkerPool):
        return work.map([(call, {}) for call in calls])
    return [work(*call) for call in calls]


def _pool(
    module: str, workers: int, timeout: float, memory_mb: int, retries: int
) -> Callable[..., WorkerPool]:
    """Graders need a library each, and no network."""
    return partial(
        WorkerPool,
        workers=workers,
        timeout=timeout,
        memory_mb=memory_mb,
        retries=retries,
        imports=[module],
        network=False,
    )


def _need(module: str, reward: str, install: str = "'proxima-rlhf[verify]'") -> None:
    if find_spec(module) is None:
        raise ValueError(
            f"the reward {reward!r} needs {module}, which is not installed: pip install {install}"
        )


def math(
    *,
    column: str = "answer",
    workers: int = 1,
    timeout: float = TIMEOUT,
    memory_mb: int = MEMORY_MB,
    retries: int = 0,
) -> VerifierReward:
    """1 where the answer equals the reference as mathematics, by math-verify."""
    _need("math_verify", "math")
    pool = _pool("math_verify", workers, timeout, memory_mb, retries)
    return VerifierReward(
        "math", [column], pool(graders.grade_math), pool(graders.complain_math, spare=False)
    )


def code(
    *,
    column: str = "tests",
    solution: str = "solution",
    workers: int = 2,
    timeout: float = TIMEOUT,
    memory_mb: int = CODE_MEMORY_MB,
) -> VerifierReward:
    """1 where the Python program in the answer passes the tests; one that hangs or crashes gets 0. Where a
    row has the column `solution`, its program must pass before the run."""
    pool = partial(
        WorkerPool, workers=workers, timeout=timeout, memory_mb=memory_mb, network=False, sandbox=True
    )
    return VerifierReward(
        "code",
        [column],
        pool(code_tests.grade),
        pool(code_tests.complain_by_running, spare=False, once=False),
        constants=("", "pass"),  # of a program each
        references_are_answers=False,
        checked_of=lambda row: {"tests": row[column], "solution": row.get(solution)},
        failed=0.0,
    )


def json_schema(
    *,
    schema: str | None = None,
    column: str = "",
    workers: int = 1,
    timeout: float = TIMEOUT,
    memory_mb: int = MEMORY_MB,
    retries: int = 0,
) -> VerifierReward:
    """1 where the answer is JSON that a schema allows: that of a file, or of each row's column."""
    _need("jsonschema", "json_schema")
    if bool(schema) == bool(column):
        raise ValueError("json_schema needs either schema=FILE or column=NAME, in which each row has its own")
    given = ""
    if schema:
        try:
            given = read_given(schema).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"json_schema cannot read the schema {schema!r}: {error}") from None
        if complaint := graders.complain_schema(given):
            raise ValueError(f"json_schema cannot use the schema {schema!r}: {complaint}")
    pool = _pool("jsonschema", workers, timeout, memory_mb, retries)
    constants = ("{}", "[]", "null", '""')
    columns = [column] if column else []
    fixed = (lambda row: given) if given else None
    return VerifierReward(
        "json_schema",
        columns,
        pool(graders.grade_schema),
        graders.complain_schema,
        constants=constants,
        reference_of=fixed,
    )


def choice(*, column: str = "answer") -> VerifierReward:
    """1 where the answer chooses the letter of the reference."""
    return VerifierReward("choice", [column], graders.grade_choice, graders.complain_choice)


def gym(
    name: str,
    *,
    workers: int = 1,
    timeout: float = TIMEOUT,
    memory_mb: int = MEMORY_MB,
    retries: int = 0,
) -> VerifierReward:
    """reasoning-gym's own score, 0 to 1, by the columns `answer` and `metadata` of its entries."""
    check_generator(name)
    _need("reasoning_gym", f"{GYM_PREFIX}{name}", "reasoning-gym")
    pool = _pool("reasoning_gym", workers, timeout, memory_mb, retries)

    def entry(row: Columns) -> dict[str, JsonValue]:
        return {
            "generator": name,
            "question": row.get("question"),
            "answer": row["answer"],
            "metadata": row["metadata"],
        }

    return VerifierReward(
        name,
        ["answer", "metadata"],
        pool(graders.grade_gym),
        pool(graders.complain_gym, spare=False),
        reference_of=entry,
    )


VERIFIERS: dict[str, Callable[..., VerifierReward]] = {
    maker.__name__: maker for maker in (math, code, json_schema, choice)
}


def open_verifier(spec: RewardSpec) -> VerifierReward | None:
    """The verifier that a spec names; None where it names none."""
    source = str(spec.source)
    if source.startswith(GYM_PREFIX):
        opened = gym(source.removeprefix(GYM_PREFIX), **check_options(spec, keyword_options(gym)))
    elif maker := VERIFIERS.get(source):
        opened = maker(**check_options(spec, keyword_options(maker)))
    else:
        return None
    opened.label = spec.label
    return opened
