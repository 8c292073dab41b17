"""Probes a reward. In: a reward, samples of the policy, honest answers. Out: `RewardEvidence`: its scores in
each call, by the call's name, and how long it took.

Every reward is called on its own, as a PPO step calls it; `add_up` makes the evidence of their weighted sum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import fmean, pstdev

from proxima.rewards import RewardOutcome, RewardSource, Samples
from proxima.tools.doctor.cheap_tricks import TRICKS, Answer, Writer
from proxima.tools.doctor.reward_calls import HANGS, call_reward

TIMED = 3  # calls, where the first is not quick
QUICK = 0.1  # seconds
TAIL_CALLS, TAIL_SECONDS = 100, 1.0  # calls with one answer that show how slow one can be, and their time
HONEST = "honest"
PLAIN = ("samples", HONEST, *(trick.name for trick in TRICKS))
"""Calls on answers that differ from each other; the others repeat some of these in another way."""

Plan = dict[str, list[Answer]]
"""What is scored in one call, by the call's name."""


@dataclass
class RewardEvidence:
    """What one reward, or the weighted sum of all, gave in each call; nan where there was no score."""

    label: str
    scores: dict[str, list[float]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # tokens of the samples
    seconds: dict[str, float] = field(default_factory=dict)  # of one answer alone, by what was scored
    calls: list[float] = field(default_factory=list)  # seconds of every call with one answer
    batch_seconds: float = 0.0  # of one answer among all samples
    failures: dict[str, str] = field(default_factory=dict)  # why a call had answers without a score
    loses_batch: list[str] = field(default_factory=list)  # answers beside which no other gets a score
    honest_are: str = ""  # which answers count as honest

    def known(self, name: str) -> list[float]:
        """The scores of a call, without nan."""
        return [score for score in self.scores.get(name, []) if not math.isnan(score)]

    @property
    def spread(self) -> float:
        """Standard deviation of the scores of all answers that differ."""
        found = [score for name in PLAIN for score in self.known(name)]
        return pstdev(found) if found else 0.0

    def change(self, name: str, other: str) -> float:
        """By how much scores differ between two calls on the same answers, on average; nan where unknown."""
        both = zip(self.scores[name], self.scores[other], strict=True)
        moved = [abs(one - two) for one, two in both if not math.isnan(one + two)]
        return fmean(moved) if moved else math.nan


def plan_calls(samples: Sequence[Answer], honest: Sequence[Answer], writer: Writer) -> Plan:
    """All batches to score.

    Args:
        samples: of the policy.
        honest: the demonstrations, or the samples again if there are none.
    """
    plan = {
        "samples": list(samples),
        "again": list(samples),
        "reversed": list(samples)[::-1],
        "twice": [*samples, *samples],
        HONEST: list(honest),
        "right prompts": with_other_prompts([*samples, *honest])[0],
        "other prompts": with_other_prompts([*samples, *honest])[1],
    }
    return plan | {trick.name: writer.play(trick, honest) for trick in TRICKS}


def with_other_prompts(answers: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    """Those answers for which the next prompt is another one, and the same after that prompt."""
    shifted = [
        (one, one._replace(prompt=following.prompt))
        for one, following in zip(answers, [*answers[1:], *answers[:1]], strict=True)
        if one.prompt != following.prompt
    ]
    return [one for one, _ in shifted], [other for _, other in shifted]


@dataclass
class Prober:
    """Calls one reward, and never raises what it raises; one that did not return is not called again."""

    source: RewardSource
    make: Callable[[Sequence[Answer]], Samples]
    hangs: bool = False

    def call(self, answers: Sequence[Answer]) -> tuple[RewardOutcome, float]:
        """The outcome, and the seconds it took."""
        return self.score(self.make(answers))

    def score(self, samples: Samples) -> tuple[RewardOutcome, float]:
        """The same of samples that are there already."""
        if self.hangs:
            return RewardOutcome.failed(len(samples), ""), 0.0
        start = time.perf_counter()
        outcome = call_reward(self.source, samples)
        self.hangs = HANGS in outcome.reason
        return outcome, time.perf_counter() - start

    def probe(self, label: str, plan: Plan) -> RewardEvidence:
        found = RewardEvidence(label, lengths=[len(answer.ids) for answer in plan["samples"]])
        times = {}
        for name, answers in plan.items():
            if not answers:
                continue
            outcome, times[name] = self.call(answers)
            found.scores[name] = outcome.totals
            if outcome.reason:
                found.failures[name] = outcome.reason
        found.batch_seconds = min(times["samples"], times["again"]) / len(plan["samples"])
        found.scores["reversed"].reverse()
        found.scores["alone"] = self._alone(plan, found)
        found.loses_batch = [
            trick.name for trick in TRICKS if trick.name in found.failures and self._loses(plan, trick.name)
        ]
        return found

    def _alone(self, plan: Plan, found: RewardEvidence) -> list[float]:
        """Scores of the samples, each in a call of its own; the times of these, and of one of each trick."""
        scores = []
        for i, answer in enumerate(plan["samples"]):
            score, found.seconds[f"sample {i + 1}"] = self._timed(answer, found.calls)
            scores.append(score)
        for trick in TRICKS:
            for answer in plan[trick.name][:1]:
                _, found.seconds[trick.name] = self._timed(answer, found.calls)
        for answer in cycle(plan["samples"]):
            if len(found.calls) >= TAIL_CALLS or sum(found.calls) > TAIL_SECONDS or self.hangs:
                return scores
            found.calls.append(self.call([answer])[1])
        return scores

    def _timed(self, answer: Answer, calls: list[float]) -> tuple[float, float]:
        """Score and seconds of one answer: the fastest of several calls, since other programs run on this
        machine too. All of them are noted in `calls`."""
        outcome, fastest = self.call([answer])
        calls.append(fastest)
        for _ in range(TIMED - 1):
            if fastest > QUICK:
                calls.append(self.call([answer])[1])
                fastest = min(fastest, calls[-1])
        return outcome.totals[0], fastest

    def _loses(self, plan: Plan, name: str) -> bool:
        """Whether good answers lose their scores where one such answer is in their batch."""
        outcome, _ = self.call([*plan["samples"], plan[name][0]])
        return all(map(math.isnan, outcome.sequence))


def add_up(parts: Sequence[tuple[float, RewardEvidence]], plan: Plan, eos_penalty: float) -> RewardEvidence:
    """The evidence of the weighted sum, which PPO maximises, minus the penalty of answers without EOS."""
    total = RewardEvidence("sum", lengths=parts[0][1].lengths)
    for name in parts[0][1].scores:
        columns = [[weight * score for score in part.scores[name]] for weight, part in parts]
        answers = plan["samples" if name in ("alone", "reversed") else name]
        costs: Mapping[bool, float] = {True: 0.0, False: eos_penalty}
        total.scores[name] = [
            math.fsum(scores) - costs[answer.ended] for *scores, answer in zip(*columns, answers, strict=True)
        ]
    return total
