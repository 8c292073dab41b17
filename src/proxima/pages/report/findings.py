"""The findings of a report, in sentences: did it learn, did it game the reward, is the critic good, what to
change next. In: its metrics and samples. Out: findings, each a question with an answer, a sentence, and the
numbers that say so.

Did it learn, what did it cost in KL, did it game the reward, is the critic good, what to change next. Every
sentence follows from a rule on the numbers beside it; where they are too few, the finding says that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from proxima.evaluator import words
from proxima.pages.report.constant_answers import AgainstConstant, against_constants
from proxima.pages.report.over_optimisation import (
    ENOUGH_POINTS,
    ENOUGH_STEPS,
    FAR,
    TITLES,
    Evidence,
    Metrics,
    Optimisation,
    Point,
    Samples,
    judge_optimisation,
    points_of,
    sampled_ends,
    signs,
)
from proxima.pages.report.report_curves import SHOWN, Constants
from proxima.pages.report.run_outcome import HeldOutNumbers, StepMean, ends, judge, steps_of
from proxima.pages.report.short_numbers import percent, short
from proxima.runs import title_of

Status = Literal["good", "bad", "open"]

LEARNED, COST, GAMED, CRITIC, NEXT = (
    "Did it learn?",
    "What did it cost in KL?",
    "Did it game the reward?",
    "Is the critic good?",
    "What to change next?",
)
TOO_SHORT = "too early to say"
ONLY_REWARD = "its reward rose"
HARDLY = 0.02  # nats per response: the policy is still the reference
MOST_OF_IT = 0.9  # of the gain, with half of the KL
WEAK_CRITIC = 0.2  # explained variance
BIASED = 0.5  # mean error of the values, in standard deviations of the advantages
FAILED_STEPS = 3  # without a reward, at the end of a run
FEW_END = 0.5  # share of answers that finish
FLAT = 1e-6  # standard deviation of the rewards
GAMING = ("length", "repetition", "copying", "opening", "variety", "spread")
VOUCHED = {
    "judges": "Judges prefer its answers",
    "verifiable rewards": "It is verifiably right more often than the best constant answer",
}
TEXTUAL = ("repetition", "copying", "opening")
LEVELLED = "The reward has stopped rising, so more steps at these settings are unlikely to help."
ENDING_SAMPLES = 10_000  # of best-of-n that a KL is compared with


@dataclass(frozen=True)
class RunFinding:
    """One question about a run, answered."""

    question: str
    answer: str
    status: Status
    sentence: str
    evidence: list[Evidence] = field(default_factory=list)
    step: int | None = None  # of the middle number of the evidence
    points: list[tuple[float, float, float]] = field(default_factory=list)  # KL, quality, step


def find(
    metrics: Metrics,
    samples: Samples = (),
    measured: HeldOutNumbers | None = None,
    constants: Constants | None = None,
) -> list[RunFinding]:
    """The findings of a run, finished or not.

    Args:
        samples: rows of `Run.samples`.
        measured: what held-out prompts show, where there were any.
        constants: the best constant answers of verifiable rewards.
    """
    points, optimised = points_of(metrics, samples), judge_optimisation(metrics, samples, constants)
    against = list(against_constants(metrics, constants or {}))
    found = [
        without_the_end(beside_constants(learned(metrics, measured, optimised), against), metrics),
        cost(points, optimised),
        constant_like(gamed(points, optimised, samples), against),
        critic(metrics),
    ]
    return [*found, change_next(metrics, points, optimised, found)]


def learned(metrics: Metrics, measured: HeldOutNumbers | None, optimised: Optimisation) -> RunFinding:
    """By held-out prompts if there are any, else by the training reward; judges overrule both. What speaks
    against a gain comes first."""
    told, better = judge(metrics, measured)
    shown = _judged_by(metrics, measured)
    if optimised.is_bad or optimised.decided_by == "judges":
        shown += [each for each in optimised.evidence if each.title in (TITLES["reward"], TITLES["quality"])]
    if measured is None and lacks_rewards(metrics):
        return RunFinding(LEARNED, "not measured", "bad", told)
    judged, warned = optimised.decided_by == "judges", f"{optimised.sentence} {told}"
    if optimised.is_bad:
        until = optimised.status == "over-optimised" and better
        perhaps = "perhaps " if optimised.is_guess else ""
        answer = f"{perhaps}until step {optimised.step}" if until else "no"
        return RunFinding(LEARNED, answer, "bad", warned, shown, optimised.step)
    if optimised.status == "stuck" and judged:
        return RunFinding(LEARNED, "not shown", "open", warned, shown, optimised.step)
    if optimised.status == "one sign" and better:
        return RunFinding(LEARNED, ONLY_REWARD, "open", warned, shown, optimised.step)
    if optimised.status == "good" and (judged or better):
        return RunFinding(LEARNED, "yes", "good", f"{told} {optimised.sentence}", shown, optimised.step)
    answers: dict[bool | None, tuple[str, Status]] = {
        True: ("yes", "good"),
        False: ("no", "bad"),
        None: (TOO_SHORT if optimised.status == "too short" else "not shown", "open"),
    }
    return RunFinding(LEARNED, *answers[better], told, shown, optimised.step)


def lacks_rewards(metrics: Metrics) -> bool:
    """Whether steps were logged, and the rewards of all failed."""
    return steps_of(metrics) > 0 and not any(map(math.isfinite, metrics.get("avg_reward", ())))


def failed_at_the_end(metrics: Metrics) -> int:
    """The last steps, one after the other, that have no reward."""
    rewards = metrics.get("avg_reward", ())
    known = [place for place, value in enumerate(rewards) if math.isfinite(value)]
    return len(rewards) - 1 - known[-1] if known else 0


def beside_constants(found: RunFinding, against: Sequence[AgainstConstant]) -> RunFinding:
    """What the best constant answer scores belongs to every score: only what is above it was learned."""
    if not against:
        return found
    told = " ".join(each.sentence for each in against)
    if found.answer in ("yes", ONLY_REWARD) and not all(each.is_above for each in against):
        answer = "no more than a constant answer"
        return replace(found, answer=answer, status="open", sentence=f"{told} {found.sentence}")
    return replace(found, sentence=f"{found.sentence} {told}")


def without_the_end(found: RunFinding, metrics: Metrics) -> RunFinding:
    """What was learned is said of steps that have a reward; where the last ones have none, that is said
    first."""
    if (count := failed_at_the_end(metrics)) < FAILED_STEPS:
        return found
    answer = "it did" if found.answer == "yes" else found.answer
    status: Status = "open" if found.status == "good" else found.status
    told = f"The last {count} steps have no reward; before that: {found.sentence}"
    return replace(found, answer=answer, status=status, sentence=told)


def constant_like(found: RunFinding, against: Sequence[AgainstConstant]) -> RunFinding:
    """A score that rose to that of a constant answer is what saying only this looks like."""
    reached = [each for each in against if each.has_reached]
    if not reached or found.answer == TOO_SHORT:
        return found
    told = " ".join([found.sentence, *(_rose_to(each) for each in reached)])
    if found.status == "bad":
        return replace(found, sentence=told)
    return replace(found, answer="a constant answer may do it", status="open", sentence=told)


def _rose_to(each: AgainstConstant) -> str:
    return (
        f"The score of {each.reward} rose to {short(each.last.mean)}, which the constant answer "
        f"{each.answer[:SHOWN]!r} gives too: read some samples."
    )


def _judged_by(metrics: Metrics, measured: HeldOutNumbers | None) -> list[Evidence]:
    """The two numbers of the sentence that `judge` writes."""
    if measured is not None:
        return [Evidence("Reward on held-out prompts", measured.first, math.nan, measured.last.value)]
    first, last = ends(metrics.get("avg_reward", ()))
    title = f"{title_of('avg_reward')}, mean of {last.steps} step{'s' if last.steps > 1 else ''}"
    return [Evidence(title, first.mean, math.nan, last.mean)] if last.steps else []


def cost(points: Sequence[Point], optimised: Optimisation) -> RunFinding:
    """The KL to the reference at the end, and the reward that came with it."""
    if optimised.status == "too short" or not math.isfinite(points[-1]["distance"]):
        return RunFinding(COST, TOO_SHORT, "open", "Too few steps with a KL to say what they brought.")
    start, end = points[0], points[-1]
    nats, gain = end["distance"], end["reward"] - start["reward"]
    half = next(point for point in reversed(points) if point["distance"] <= nats / 2 or point is start)
    if optimised.is_bad:
        half = min(points, key=lambda point: abs(point["step"] - (optimised.step or 0)))
    share = (half["reward"] - start["reward"]) / gain if gain else math.nan
    shown = [
        Evidence(title_of("kl_exact"), start["distance"], half["distance"], nats),
        Evidence(TITLES["reward"], start["reward"], half["reward"], end["reward"]),
    ]
    far = f"It ended {short(nats)} nats per response from the reference, {_as_best_of(nats)}"
    then = f"at step {half['step']:g}, at {short(half['distance'])} nats"
    answer = f"{short(nats)} nats"
    status: Status = "good"
    told = f"{far}: {short(gain / nats)} of reward per nat." if nats else ""
    if nats < HARDLY:
        answer, status = "almost nothing", "open"
        told = f"The policy has hardly moved: {short(nats)} nats per response from the reference."
    elif not gain > math.hypot(start["reward_noise"], end["reward_noise"]):
        answer, status = f"{short(nats)} nats, for no gain", "bad"
        told = f"{far}, and the reward did not rise beyond its noise."
    elif optimised.is_bad:
        answer, status = f"{short(nats)} nats, too many", "bad"
        was, not_more = ("may have been", "probably did not") if optimised.is_guess else ("was", "did not")
        until = f"It {was} good until {then.removeprefix('at ')}"
        told = f"{far}. {until}; after that, quality {not_more} improve."
    elif share >= MOST_OF_IT:
        answer, status = f"{short(nats)} nats, half of it for little", "open"
        told = f"{far}. {percent(share)} % of the gain was there {then}."
    elif optimised.status == "one sign" and nats >= FAR:
        answer, status = f"{short(nats)} nats, far", "open"
    return RunFinding(COST, answer, status, told, shown, int(half["step"]))


def _as_best_of(nats: float) -> str:
    """The n whose best-of-n has at most this KL, log n - (n - 1) / n, in words."""
    n = next((n for n in range(1, ENDING_SAMPLES) if math.log(n) - (n - 1) / n >= nats), None)
    return (
        f"about as far as best-of-n with n = {n:,}"
        if n
        else f"farther than best-of-n with n = {ENDING_SAMPLES:,}"
    )


def gamed(points: Sequence[Point], optimised: Optimisation, samples: Samples) -> RunFinding:
    """Length, repetition, copying, openings; judges or verifiable rewards decide if there are any."""
    if optimised.status == "too short":
        told = "Too few steps to tell a change of the answers from chance."
        return RunFinding(GAMED, TOO_SHORT, "open", told)
    start, end = points[0], points[-1]
    found = signs(start, end)
    always = {TITLES[name] for name in GAMING}
    shown = [each for each in optimised.evidence if each.title in always or each.sign]
    if "opening" in found:
        found["opening"] += _opening_words(samples)
    listed = " and ".join(found.values())
    measured = any(math.isfinite(end[name]) for name in TEXTUAL)
    status: Status
    if optimised.status == "over-optimised":
        answer, status, told = "yes", "bad", optimised.sentence
        if listed and listed not in told:
            told = f"{told} {listed[0].upper()}{listed[1:]}."
    elif optimised.status == "collapsed":
        answer, status, told = "it collapsed", "bad", optimised.sentence
    elif found and optimised.status == "good":
        answer, status = "probably not", "good"
        told = f"{VOUCHED[optimised.decided_by]}, although {listed}."
    elif found:
        answer, status = f"{len(found)} sign{'s' if len(found) > 1 else ''} of it", "open"
        told = f"{listed[0].upper()}{listed[1:]}. Read some samples, and ask a judge (--judges)."
    elif not measured:
        answer, status = "not measured", "open"
        known = (
            "The length changed by less than half" if math.isfinite(end["length"]) else "No length was logged"
        )
        told = f"{known}; more needs held-out prompts (--validation)."
    else:
        answer, status = "no sign of it", "good"
        told = f"Near where they began: {', '.join(each.title for each in shown)}."
    return RunFinding(GAMED, answer, status, told, shown, optimised.step, optimised.points)


def _opening_words(samples: Samples) -> str:
    """The opening that has spread, where samples show it."""
    if (seen := sampled_ends(samples)) is None:
        return ""
    firsts = Counter(found[0] for row in seen[1] if (found := words(str(row.get("text", "")))))
    if not firsts:
        return ""
    word, count = firsts.most_common(1)[0]
    return f" (“{word[:40]}” opens {count} of the last {len(seen[1])} samples)"


def critic(metrics: Metrics) -> RunFinding:
    """Explained variance at the end of the run, and whether the values are off on average."""
    column = metrics.get("explained_variance", ())
    if not any(map(math.isfinite, column)):
        told = "No explained variance was logged: this run has no value model, or no step yet."
        return RunFinding(CRITIC, "not measured", "open", told)
    first, last = ends(column)
    shown = [Evidence(title_of("explained_variance"), first.mean, math.nan, last.mean)]
    shown += [
        Evidence(f"Return - value, quarter {part} of the responses", first, math.nan, last)
        for part, (first, last) in _biases(metrics).items()
    ]
    if sum(map(math.isfinite, column)) < ENOUGH_STEPS:
        told = f"So far it explains {short(last.mean)} of the variance of the returns."
        return RunFinding(CRITIC, TOO_SHORT, "open", told, shown)
    said = (
        f"explained variance went from {short(first.mean)} to {short(last.mean)} (1 is perfect, 0 a constant)"
    )
    if last.mean < 0:
        told = f"Its values are worse than a constant: {said}."
        return RunFinding(CRITIC, "no", "bad", told, shown)
    if last.mean < WEAK_CRITIC:
        return RunFinding(
            CRITIC, "weak", "open", f"It knows little of what an answer will score: {said}.", shown
        )
    if far := worst_bias(metrics):
        told = f"It ranks answers, but its values are off on average: {said}, and {far}."
        return RunFinding(CRITIC, "biased", "open", told, shown)
    return RunFinding(CRITIC, "yes", "good", f"It foresees part of the score: {said}.", shown)


def _biases(metrics: Metrics) -> dict[int, tuple[float, float]]:
    """Return - value at both ends of the run, by the quarters of the responses that it is known for."""
    found = {part: ends(metrics.get(f"value_error_position/{part}", ())) for part in range(1, 5)}
    return {part: (first.mean, last.mean) for part, (first, last) in found.items() if last.steps}


def worst_bias(metrics: Metrics) -> str:
    """Where the values are off by more than `BIASED` standard deviations of the advantages, in words."""
    spread = ends(metrics.get("advantage_std", ()))[1].mean
    errors = {part: last for part, (_, last) in _biases(metrics).items()}
    part = max(errors, key=lambda each: abs(errors[each]), default=0)
    if not part or not abs(errors[part]) > BIASED * spread > 0:
        return ""
    low = "low" if errors[part] > 0 else "high"
    return f"in quarter {part} of the responses they are {short(abs(errors[part]))} too {low}"


def change_next(
    metrics: Metrics, points: Sequence[Point], optimised: Optimisation, found: Sequence[RunFinding]
) -> RunFinding:
    """What follows from the other findings, the most pressing first."""
    advice = list(_advice(metrics, points, optimised, {each.question: each for each in found}))
    things = len(advice) - (LEVELLED in advice)
    answer = f"{things} thing{'s' if things > 1 else ''}" if things else "nothing pressing"
    pressing = optimised.is_bad or optimised.status == "stuck"
    status: Status = "bad" if optimised.is_bad else "open" if pressing or len(advice) > 1 else "good"
    return RunFinding(NEXT, answer, status, " ".join(advice))


def _advice(
    metrics: Metrics, points: Sequence[Point], optimised: Optimisation, found: Mapping[str, RunFinding]
) -> Iterator[str]:
    rate, coef = (_largest(metrics, name) for name in ("learning_rate", "kl_coef"))
    if lacks_rewards(metrics):
        yield "Find out why no step has a reward: read the log, and try proxima doctor --audit."
        return
    if optimised.status == "too short":
        yield f"Train for {ENOUGH_STEPS} steps or more, with {ENOUGH_POINTS} evaluations, to say more."
        return
    if optimised.status == "over-optimised":
        yield (
            f"Take the checkpoint nearest to step {optimised.step}, keep the policy closer to the reference "
            f"(a KL budget, or a kl_coef above {short(coef)}), or have people compare the policy's own "
            "answers (proxima label --from) and train the reward model on them (proxima reward --continue)."
        )
    elif optimised.status in ("collapsed", "declined"):
        yield (
            f"Go back to the checkpoint nearest to step {optimised.step}, and lower learning_rate (it was "
            f"{short(rate)}) or raise kl_coef (it was {short(coef)})."
        )
    elif optimised.status == "stuck":
        yield _unstick(metrics, points[-1]["distance"], rate, coef)
    elif found[GAMED].answer.endswith("of it") and found[GAMED].status == "open":
        yield "Read samples of the last steps before you train longer: there is a sign of gaming."
    elif still_rising(points):
        yield "Train longer: the reward was still rising at the end."
    else:
        yield LEVELLED
    if found[CRITIC].answer in ("no", "weak", "biased"):
        yield "Give the critic more: raise value_learning_rate or value_epochs, or set critic_warmup_steps."
    if found[COST].answer.endswith("for little"):
        nats = short(found[COST].evidence[0].middle)
        yield f"A KL budget of about {nats} nats (kl_controller budget) keeps most of the gain."
    if points[-1]["eos"] < FEW_END:
        yield (
            f"Only {percent(points[-1]['eos'])} % of the answers finish: raise max_new_tokens, or set "
            "missing_eos_penalty."
        )
    if optimised.decided_by not in VOUCHED:
        yield "Name a judge that is not trained on (--validation, --judges): signs alone prove little."


def _unstick(metrics: Metrics, nats: float, rate: float, coef: float) -> str:
    spread = ends(metrics.get("reward_std", ()))[1].mean
    if spread <= FLAT:
        return "Change the reward: all answers of a batch score the same, so there is nothing to learn from."
    if nats < HARDLY:
        was = f"(it was {short(rate)}) or lower kl_coef (it was {short(coef)})"
        return f"The policy hardly moves: raise learning_rate {was}."
    return (
        "It moves, but not towards more reward: look for a reward that tells answers apart (proxima doctor "
        "--audit), and use more prompts per step (batch_size)."
    )


def still_rising(points: Sequence[Point]) -> bool:
    """Whether the last quarter of the run is above the one before it by more than the noise of a point."""
    quarter = max(len(points) // 4, 1)
    late, before = points[-quarter:], points[-2 * quarter : -quarter]
    means = [StepMean.of([point["reward"] for point in part]).mean for part in (before, late)]
    return means[1] - means[0] > math.sqrt(2 / quarter) * points[-1]["reward_noise"]


def _largest(metrics: Metrics, name: str) -> float:
    """A learning rate falls by its schedule: its peak is what was set."""
    return max(filter(math.isfinite, metrics.get(name, ())), default=math.nan)
