"""What is sent to a rollout engine and what comes back; the check that its log-probabilities are the
trainer's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from proxima.core.sampling import Sampling

TIES = 4  # times top_k: the most tokens in a sampling mask; in bfloat16 several share the last place
ROUNDING = 1e-3  # by how much rounding may lift a log-probability above 0


@dataclass(frozen=True)
class PolicyVersion:
    """The policy after some update, saved in a folder under a name that is never reused."""

    number: int
    name: str
    folder: Path
    digest: str
    adapter: bool
    """A LoRA adapter in PEFT's format; otherwise all weights."""


@dataclass(frozen=True)
class WeightCheck:
    """A text and its log-probabilities on the training side: an engine must reproduce them before it is
    sampled from."""

    ids: list[int]
    logprobs: list[float]  # of ids[1:], at temperature 1, over the whole vocabulary
    tolerance: float  # largest mean absolute difference
    likeliest: int = 1
    """How many tokens may be the likeliest next one: as many as rounding could make equal to it."""

    def check(self, found: Sequence[float], sampled: float) -> None:
        """
        Args:
            found: the engine's log-probabilities of ids[1:].
            sampled: its log-probability of a token sampled with top_k 1: 0, or -log n where n tokens tie.
        """
        if len(found) != len(self.logprobs) or not all(map(math.isfinite, found)):
            raise InvalidResponse(
                f"{len(self.logprobs)} log-probabilities were asked for, {len(found)} came, or some are not "
                "finite"
            )
        gap = sum(abs(ours - theirs) for ours, theirs in zip(self.logprobs, found, strict=True)) / len(found)
        if not gap <= self.tolerance:
            raise InvalidResponse(
                "it has another model or other weights: its log-probabilities differ from the training "
                f"side's by {gap:.3g} per token (at most {self.tolerance:g} is rounding)"
            )
        if not any(is_one_of(count, sampled) for count in range(1, self.likeliest + 1)):
            raise InvalidResponse(
                "its log-probabilities ignore top_k; start it with --logprobs-mode processed_logprobs"
            )


def is_one_of(count: int, logprob: float) -> bool:
    """Whether a token with this log-probability was sampled from `count` equally likely ones."""
    return count > 0 and abs(logprob + math.log(count)) <= ROUNDING


@dataclass(frozen=True)
class RolloutJob:
    """A batch of prompts to sample one response each for."""

    rows: list[list[int]]  # prompt ids, no padding
    seeds: list[int]  # one per row, so that a response does not depend on which server samples it
    sampling: Sampling
    vocabulary: int


@dataclass(frozen=True)
class SampledResponse:
    """Token ids and the engine's own log-probabilities of them."""

    ids: list[int]
    logprobs: list[float]
    kept: list[list[int]] | None = None
    """The ids that each token was sampled from, where the engine returns them (its sampling mask)."""

    def ended(self, eos_ids: Sequence[int]) -> bool:
        return self.ids[-1] in eos_ids


class InvalidResponse(Exception):  # noqa: N818
    """A response or a check that an engine got wrong."""


class RolloutEngine(Protocol):
    """Samples responses. Versions come in order; the two newest may be sampled from."""

    retries: int
    """Rows sent again so far."""

    def load(self, version: PolicyVersion, check: WeightCheck) -> None: ...
    def sample(self, job: RolloutJob, version: PolicyVersion) -> Future[list[SampledResponse]]: ...
    def unload(self, version: PolicyVersion) -> None: ...


def parse_response(ids: object, logprobs: object, job: RolloutJob, masks: object = None) -> SampledResponse:
    """The response to one row, as the built-in engine would give it (at most one EOS, and that last); raises
    `InvalidResponse` for anything else.

    Args:
        masks: the ids that each token was sampled from; None where the engine does not return them.
    """
    limit = job.sampling.max_new_tokens
    ends = job.sampling.eos_ids
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise InvalidResponse("no list of token ids")
    if not 1 <= len(ids) <= limit:
        raise InvalidResponse(f"{len(ids)} tokens where 1 to {limit} were asked for")
    if strange := [token for token in ids if not 0 <= token < job.vocabulary]:
        raise InvalidResponse(f"token id {strange[0]} of a vocabulary of {job.vocabulary}")
    if any(token in ends for token in ids[:-1]) or (len(ids) < limit and ids[-1] not in ends):
        raise InvalidResponse("a response that does not stop at EOS or at max_new_tokens")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        raise InvalidResponse("not one log-probability per token")
    if not all(
        type(number) in (int, float) and math.isfinite(number) and number <= ROUNDING for number in logprobs
    ):
        raise InvalidResponse("log-probabilities that are not finite numbers of at most 0")
    return SampledResponse(ids, [float(number) for number in logprobs], _parse_masks(masks, ids, job))


def _parse_masks(masks: object, ids: list[int], job: RolloutJob) -> list[list[int]] | None:
    if masks is None:
        return None
    if not isinstance(masks, list) or len(masks) != len(ids):
        raise InvalidResponse("not one sampling mask per token")
    for mask, token in zip(masks, ids, strict=True):
        if not isinstance(mask, list) or not all(
            type(kept) is int and 0 <= kept < job.vocabulary for kept in mask
        ):
            raise InvalidResponse("a sampling mask that is not a list of token ids")
        if token not in mask or len(set(mask)) != len(mask):  # twice would count its probability twice
            raise InvalidResponse("a sampling mask without the sampled token, or with an id twice")
        if len(mask) > TIES * job.sampling.top_k:
            raise InvalidResponse(f"a sampling mask of {len(mask)} tokens with top_k {job.sampling.top_k}")
    return masks
