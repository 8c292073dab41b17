"""`proxima doctor --audit`: what is wrong with a reward, and which cheap trick would win it.

In: a trainer, prompts, answers in the data where it has any. Out: findings.

`PART_CHECKS` read the evidence of one reward, `SUM_CHECKS` that of the weighted sum, which PPO maximises;
with an environment or tools `EPISODE_CHECKS` read that of the sum over whole episodes. A new check is a
function and a line there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import StatisticsError, correlation, fmean, median
from typing import NamedTuple

from proxima.config import RewardSpec
from proxima.core.tokenizer import Tokenizer
from proxima.data import (
    ListRows,
    Rows,
    kinds_of,
    read_demonstrations,
    read_preferences,
    read_prompts,
    read_ratings,
)
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import RewardSource, Samples
from proxima.tools.doctor.cheap_tricks import TRICKS, Answer, Writer
from proxima.tools.doctor.episode_evidence import episode_evidence
from proxima.tools.doctor.finding import Finding, fail, ok, warn
from proxima.tools.doctor.reward_checks import is_flat, reads_episodes
from proxima.tools.doctor.reward_evidence import (
    HONEST,
    PLAIN,
    Plan,
    Prober,
    RewardEvidence,
    add_up,
    plan_calls,
)

AUDIT_STEP = 1_000_003  # its noise: no other check samples the same answers
NOTICEABLE = 0.05  # of the spread of all scores; less is rounding, or does no harm
MOSTLY_NOISE = 0.5  # of the spread; two draws of pure noise differ by 1.1
STRONG = 0.8  # correlation; 16 unrelated pairs reach it once in 5,000 times
FEWEST = 8  # samples, for a correlation
NEARLY_ALL = 0.9
UNKNOWN = "not measured: no answer got a score"
TAIL, SLOW = 10, 0.25  # times the median, and seconds, from which an answer is slow
NOW_AND_THEN = 2  # slow calls; one alone may be another program of this machine


def check_scored(found: RewardEvidence) -> Finding:
    """Every answer gets a score, however odd it is."""
    name = f"odd answers {found.label}"
    if not found.failures:
        return ok(name, f"each of {len(TRICKS)} kinds of odd answers gets a score")
    whys = "; ".join(f"{kind} ({why})" for kind, why in found.failures.items())
    if found.loses_batch:
        return fail(
            name,
            f"no score for: {whys}. One such answer leaves its whole batch without scores",
            "return a low score, or None for this answer alone, instead of raising",
        )
    return warn(name, f"no score for: {whys}", "give such answers a low score: those without are left out")


def check_repeatable(found: RewardEvidence) -> Finding:
    """The same answers twice."""
    name, change = f"repeatable {found.label}", found.change("samples", "again")
    if math.isnan(change):
        return ok(name, UNKNOWN)
    if not is_noticeable(change, found):
        return ok(name, f"the same answers twice score the same, within {change:.2g}")
    text = (
        f"the same answers twice differ by {change:.3g} on average, where the scores of different answers "
        f"have a standard deviation of {found.spread:.3g}"
    )
    if change > MOSTLY_NOISE * found.spread:
        return fail(name, text, "most of the score is noise: seed it, or average several calls")
    return warn(name, text, "noise slows learning: seed it, or average several calls")


def check_order(found: RewardEvidence) -> Finding:
    """The same batch in reverse: each answer keeps its score."""
    name, change = f"order {found.label}", found.change("samples", "reversed")
    if is_noticeable(found.change("samples", "again"), found):
        return ok(name, "not measured: the scores are not repeatable")
    if math.isnan(change):
        return ok(name, UNKNOWN)
    if not is_noticeable(change, found):
        return ok(name, "a batch in reverse order gives each answer the same score")
    return fail(
        name,
        f"the same batch in reverse order changes the scores by {change:.3g} on average: they land on other "
        "answers",
        "return the scores in the order of the completions",
    )


def check_batch(found: RewardEvidence) -> Finding:
    """An answer alone, and twice in one batch."""
    name = f"batch {found.label}"
    if is_noticeable(found.change("samples", "again"), found):
        return ok(name, "not measured: the scores are not repeatable")
    samples, twice = found.scores["samples"], found.scores["twice"]
    ways = {
        "alone": found.scores["alone"],
        "beside its copy": twice[: len(samples)],
        "as the second copy in a batch": twice[len(samples) :],
    }
    pairs = [
        (abs(one - other), one, other, way)
        for way, scores in ways.items()
        for one, other in zip(samples, scores, strict=True)
        if not math.isnan(one + other)
    ]
    if found.known("samples") and not found.known("alone"):
        text = f"answers that get scores in a batch of {len(samples)} get none alone"
        return warn(name, text, "score each answer separately: the last batch of a run may hold a single one")
    if not pairs:
        return ok(name, UNKNOWN)
    off, one, other, way = max(pairs)
    if not is_noticeable(off, found):
        return ok(name, "an answer scores the same in a batch, alone, and twice in a batch")
    return warn(
        name,
        f"an answer scores {one:.4g} in a batch of {len(samples)} and {other:.4g} {way}",
        "score each answer separately; normalize_rewards and adv_estimator compare answers where you want it",
    )


def check_time(found: RewardEvidence) -> Finding:
    """An answer that is slow every time, and calls that are slow now and then."""
    name, times = f"time {found.label}", found.seconds
    middle, slowest = median(times.values()), max(times, key=lambda kind: times[kind])
    text = (
        f"{spoken(found.batch_seconds)} per sample in a batch of {len(found.lengths)}; alone "
        f"{spoken(middle)}, slowest {spoken(times[slowest])} ({slowest}); slowest of {len(found.calls)} "
        f"calls {spoken(max(found.calls))}"
    )
    limit = max(SLOW, TAIL * middle)
    if times[slowest] > limit:
        return warn(name, text, "the slowest answer holds up its step: bound the work per answer")
    slow = sum(seconds > limit for seconds in found.calls)
    if slow < NOW_AND_THEN:
        return ok(name, text)
    return warn(
        name,
        f"{text}: {slow} took more than {spoken(limit)}, with answers that are quick when asked again",
        "a slow call holds up its step: look for retries, limits on the rate of calls, caches",
    )


def check_length(found: RewardEvidence) -> Finding:
    name = "length bias"
    known = [
        (size, score)
        for size, score in zip(found.lengths, found.scores["samples"], strict=True)
        if not math.isnan(score)
    ]
    if len(known) < FEWEST:
        return ok(
            name, f"not measured: {len(known)} samples are too few; give {FEWEST} or more with --samples"
        )
    try:
        related = correlation(*zip(*known, strict=True))
    except StatisticsError:  # a constant
        return ok(name, "not measured: the samples do not differ in length, or in score")
    sizes = [size for size, _ in known]
    text = (
        f"correlation {related:.2f} of score and length, over {len(known)} samples of {min(sizes)} to "
        f"{max(sizes)} tokens"
    )
    if abs(related) < STRONG or is_flat([score for _, score in known]):
        return ok(name, text)
    way = "longer" if related > 0 else "shorter"
    return warn(
        name, text, f"PPO would mostly learn {way} answers: score something that does not follow the length"
    )


def check_saturation(found: RewardEvidence) -> Finding:
    name, samples = "saturation", found.known("samples")
    if not samples:
        return ok(name, UNKNOWN)
    best = max(score for kind in PLAIN for score in found.known(kind))
    at_best = sum(not is_noticeable(best - score, found) for score in samples)
    text = f"{at_best} of {len(samples)} samples have the best score seen ({best:.4g})"
    if at_best < NEARLY_ALL * len(samples):
        return ok(name, text)
    return warn(name, text, "little is left to learn: take harder prompts, or a reward with finer grades")


def check_prompt(found: RewardEvidence) -> Finding:
    """The same answers after other prompts."""
    name = "prompt matters"
    if "other prompts" not in found.scores or is_flat(found.known("right prompts")):
        return ok(name, "not measured: the prompts, or the scores of the answers, do not differ")
    change = found.change("right prompts", "other prompts")
    if math.isnan(change):
        return ok(name, UNKNOWN)
    if is_noticeable(change, found):
        return ok(name, f"after other prompts the same answers score differently, by {change:.3g} on average")
    return warn(
        name,
        f"after other prompts the same answers score the same, within {change:.2g}: whether the question was "
        "answered does not count",
        "add a reward that reads the prompt or a column of the data, unless style is all you want",
    )


def check_answer(found: RewardEvidence) -> Finding:
    """Other answers to the same prompts."""
    name, honest = "answer matters", found.known(HONEST)
    others = [trick.name for trick in TRICKS if len(found.scores.get(trick.name, ())) == len(honest) > 0]
    changes = [change for kind in others if not math.isnan(change := found.change(HONEST, kind))]
    if not changes or is_flat(honest):
        return ok(name, "not measured: the honest answers score all the same, or not at all")
    change = max(changes)
    if is_noticeable(change, found):
        return ok(
            name, f"other answers to the same prompts score differently, by up to {change:.3g} on average"
        )
    return fail(
        name,
        f"{len(changes)} kinds of odd answers score the same as the honest ones to the same prompts, within "
        f"{change:.2g}: the score follows the prompt, not the answer",
        "score the completion; a cache must be keyed by prompt and completion",
    )


def check_tricks(found: RewardEvidence) -> Finding:
    """Which tricks score above the median honest answer, or say nothing and score as much as the best."""
    name, honest = "cheap tricks", found.known(HONEST)
    scores = {trick.name: median(known) for trick in TRICKS if (known := found.known(trick.name))}
    if not honest or not scores:
        return ok(name, "not measured: no honest answer, or no trick, got a score")
    middle, best = median(honest), max(honest)
    above = {
        kind: score
        for kind, score in sorted(scores.items(), key=lambda item: -item[1])
        if score > middle and is_noticeable(score - middle, found)
    }
    whose = f" ({found.honest_are})" if found.honest_are else ""
    text = f"{len(honest)} honest answers{whose} have a median of {middle:.4g} and a best score of {best:.4g}"
    level = [
        trick.name for trick in TRICKS if not trick.is_about and _reaches(trick.name, best, scores, found)
    ]
    if not above and level:
        said = f"as much as the best honest answer: {', '.join(level)}; {text}"
        return warn(name, said, "these say nothing about the question: make the reward score them lower")
    if not above:
        top = max(scores, key=lambda kind: scores[kind])
        return ok(name, f"{text}; no trick scores above the median (the best is {top}: {scores[top]:.4g})")
    said = f"{', '.join(f'{kind} {score:.4g}' for kind, score in above.items())}; {text}"
    if any(score > best and is_noticeable(score - best, found) for score in above.values()):
        return fail(name, said, "PPO will find these: make the reward score them below any real answer")
    return warn(name, said, "PPO may find these: make the reward score them lower")


def _reaches(kind: str, best: float, scores: Mapping[str, float], found: RewardEvidence) -> bool:
    """Whether a trick scores as much as the best honest answer, where the reward tells answers apart."""
    lowest = min([*scores.values(), *found.known("samples"), *found.known(HONEST)])
    return (
        kind in scores
        and is_noticeable(best - lowest, found)
        and not is_noticeable(best - scores[kind], found)
    )


def is_noticeable(change: float, found: RewardEvidence) -> bool:
    return change > max(NOTICEABLE * found.spread, 1e-9 * max(1.0, abs(fmean(found.known("samples") or [0]))))


def spoken(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


PART_CHECKS: list[Callable[[RewardEvidence], Finding]] = [
    check_scored,
    check_repeatable,
    check_order,
    check_batch,
    check_time,
]
SUM_CHECKS: list[Callable[[RewardEvidence], Finding]] = [
    check_length,
    check_saturation,
    check_prompt,
    check_answer,
    check_tricks,
]
EPISODE_CHECKS: list[Callable[[RewardEvidence], Finding]] = [
    check_scored,
    check_repeatable,
    check_length,
    check_saturation,
    check_answer,
    check_tricks,
]
"""In the order of the table."""


class AnswersInData(NamedTuple):
    """Prompts, with their columns, and answers that people wrote or chose."""

    what: str = ""
    pairs: Sequence[tuple[str, str]] = ()


NO_ANSWERS = AnswersInData()


def answers_in_data(rows: Rows, tokenizer: Tokenizer, count: int) -> AnswersInData:
    """Of up to `count` rows the demonstrations, the better ratings or the chosen answers; none where the data
    has only prompts."""
    kinds = kinds_of(rows)
    count = min(count, len(rows))
    part = ListRows([rows[i * len(rows) // count] for i in range(count)], rows.name)
    if "ratings" in kinds:
        what, rated = "answers in the data that are rated above average", list(read_ratings(part, tokenizer))
        middle = fmean(record.rating for record in rated)
        found = [(record.prompt, record.completion) for record in rated if record.rating >= middle]
    elif "demonstrations" in kinds:
        what = "demonstrations in the data"
        found = [(record.prompt, record.completion) for record in read_demonstrations(part, tokenizer)]
    elif "preferences" in kinds:
        what = "chosen answers in the data"
        decided = [record for record in read_preferences(part, tokenizer) if not record.tie]
        found = [(record.prompt, record.chosen) for record in decided]
    else:
        return NO_ANSWERS
    prompts = {str(prompt): prompt for prompt in read_prompts(part, tokenizer)}
    return AnswersInData(what, [(prompts[text], answer) for text, answer in found if text in prompts])


def audit(trainer: PPOTrainer, prompts: Sequence[str], data: AnswersInData = NO_ANSWERS) -> list[Finding]:
    """Findings on the trainer's rewards, from samples of its policy.

    Args:
        data: its answers count as honest; without any that the policy could write, the samples do.
    """
    config, rewards = trainer.config, trainer.reward_computer.rewards
    writer = Writer(trainer.tokenizer, trainer.models.eos_ids, config.max_new_tokens, trainer.models.device)
    sampled = Samples.of_tokens(trainer.generator.sample(prompts, AUDIT_STEP))
    samples = [
        Answer(*one) for one in zip(sampled.prompts, sampled.completion_ids, sampled.ended, strict=True)
    ]
    shown = [writer.answer(prompt, text) for prompt, text in data.pairs]
    honest = [one for one in shown if one is not None and len(one.ids) < config.max_new_tokens]
    whose = data.what if honest else "samples of the policy"
    plan = plan_calls(samples, honest or samples, writer)
    if not config.has_episodes:
        return audit_rewards(rewards, plan, writer, config.missing_eos_penalty, whose)
    parts = probe([each for each in rewards if not reads_episodes(*each)], plan, writer)
    total = episode_evidence(trainer, prompts, writer, AUDIT_STEP)
    return [*part_findings(parts), *(check(total) for check in EPISODE_CHECKS)]


def audit_rewards(
    rewards: Sequence[tuple[RewardSpec, RewardSource]],
    plan: Plan,
    writer: Writer,
    eos_penalty: float = 0.0,
    honest_are: str = "",
) -> list[Finding]:
    """Findings on each reward, then on their weighted sum."""
    parts = probe(rewards, plan, writer)
    total = add_up(parts, plan, eos_penalty)
    total.honest_are = honest_are
    return [*part_findings(parts), *(check(total) for check in SUM_CHECKS)]


def probe(
    rewards: Sequence[tuple[RewardSpec, RewardSource]], plan: Plan, writer: Writer
) -> list[tuple[float, RewardEvidence]]:
    """The weight of each reward, and its evidence."""
    return [(spec.weight, Prober(source, writer.samples).probe(spec.label, plan)) for spec, source in rewards]


def part_findings(parts: Sequence[tuple[float, RewardEvidence]]) -> list[Finding]:
    return [check(part) for _, part in parts for check in PART_CHECKS]
