"""Whether more reward was still more quality: the signs of over-optimisation and their limits. In: the
metrics of a run. Out: a status in plain words, the step after which it was not, and the numbers beside it.

Quality is what judges say who are not trained on: their win rate against the reference on held-out prompts.
If there are none, verifiable rewards that rose above their best constant answer vouch for the gain. Without
either, signs have to do: answers that get longer or shorter, alike, or repetitive, that begin alike, copy
their prompt or no longer end, an entropy or a KL that went far, or heads of the reward model that disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from proxima.core.json_record import RecordView
from proxima.evaluator import common_opening, copying, repetition
from proxima.pages.report.constant_answers import against_constants, vouch_for_gain
from proxima.pages.report.report_curves import Constants
from proxima.pages.report.short_numbers import percent, short
from proxima.runs import first_step_row, held_out_evidence, judges_in, title_of

Metrics = Mapping[str, Sequence[float]]
Status = Literal["good", "one sign", "over-optimised", "collapsed", "declined", "stuck", "too short"]
Decider = Literal["judges", "verifiable rewards", "reward", "signs"]

ENOUGH_POINTS = 3
ENOUGH_STEPS = 10
PARTS = 10  # of a run without evaluations, each the mean of its steps
WITHOUT_INTERVAL = 0.05  # by how much a win rate must fall where no interval was logged
SIGNS_NEEDED = 2  # one alone may be what the reward rightly asks for
COLLAPSED_ENTROPY, COLLAPSED_VARIETY, ALL_ALIKE = 0.1, 0.5, 0.9  # shares of the start; of answers
COLLAPSED_LENGTH = 0.2  # of the start's, where the reward has fallen too
ENDED, UNENDED = 0.5, 0.05  # shares of answers with EOS, before and after they stopped ending
FAR = 10.0  # nats per response: as far as best-of-n with n = 60,000, where a learned reward is a guess
WATCHED = {  # what is shown: the held-out metric, else that of training
    "reward": ("validation/reward", "avg_reward"),
    "quality": ("quality",),
    "kl": ("validation/kl", "kl_exact"),
    "spread": ("reward_spread",),
    "length": ("validation/response_length", "response_length"),
    "opening": ("validation/common_opening",),
    "variety": ("validation/distinct_2",),
    "repetition": ("validation/repetition",),
    "copying": ("validation/copying",),
    "entropy": ("entropy",),
    "eos": ("validation/eos_rate", "eos_rate"),
}
COPIED, COPIED_MORE = 0.5, 0.2  # a share of answers taken from the prompt that is a sign, and its growth
ENOUGH_SAMPLES = 8  # answers on either side that stand in for held-out ones
Point = Mapping[str, float]
Samples = Sequence[RecordView]


@dataclass(frozen=True)
class Evidence:
    """One number at the start, at the step after which it went wrong (or the best), and at the end."""

    title: str
    start: float
    middle: float
    end: float
    sign: str = ""  # what is suspicious about it


@dataclass(frozen=True)
class Optimisation:
    """What became of quality as the reward rose."""

    status: Status
    sentence: str
    step: int | None = None  # after which more reward was no more quality
    evidence: list[Evidence] = field(default_factory=list)
    points: list[tuple[float, float, float]] = field(default_factory=list)  # KL, quality, step
    decided_by: Decider = "signs"

    @property
    def is_bad(self) -> bool:
        return self.status in ("over-optimised", "collapsed", "declined")

    @property
    def is_guess(self) -> bool:
        """Signs prove nothing."""
        return self.status == "over-optimised" and self.decided_by == "signs"


def judge_optimisation(
    metrics: Metrics, samples: Samples = (), constants: Constants | None = None
) -> Optimisation:
    """
    Args:
        samples: rows of `Run.samples`; they stand in where there were no held-out prompts.
        constants: the best constant answers of verifiable rewards.
    """
    points = points_of(metrics, samples)
    steps = sum(map(math.isfinite, metrics.get("avg_reward", ())))
    if len(points) < ENOUGH_POINTS or steps < ENOUGH_STEPS:
        told = f"Too short to tell whether more reward still meant better answers ({steps} steps)."
        return Optimisation("too short", told)
    judged = [point for point in points if math.isfinite(point["quality"])]
    if len(judged) >= ENOUGH_POINTS:
        found = _by_judges(judged, points)
    else:
        verified = vouch_for_gain(list(against_constants(metrics, constants or {})))
        found = _by_reward(points, verified)
    return _with_collapse(found, points)


def _with_collapse(found: Optimisation, points: Sequence[Point]) -> Optimisation:
    """A collapse explains a fall; where judges or verifiable rewards see a gain, it is a sign."""
    words = collapse(points[0], points[-1])
    if not words or found.status in ("good", "one sign"):
        return found
    if found.status == "over-optimised":
        return replace(found, sentence=f"{found.sentence} The policy collapsed too: {words}.")
    step = min(_last_sound(points), found.step or 0)
    told = f"The policy collapsed: {words}. {found.sentence}"
    return _told("collapsed", told, points, step, found.decided_by)


def _by_judges(judged: Sequence[Point], points: Sequence[Point]) -> Optimisation:
    """The judges' win rate against its best: later falls count beyond the noise of one evaluation."""
    best = max(judged, key=lambda point: point["quality"])
    last = judged[-max(1, len(judged) // 4) :]
    quality = _mean([point["quality"] for point in last])
    reward = _mean([point["reward"] for point in last])
    step = int(best["step"])
    change = f"the judges' win rate went from {percent(best['quality'])} % to {percent(quality)} %"
    status: Status
    if best not in last and best["quality"] - quality > math.sqrt(2) * best["noise"]:
        moved = f"the reward went from {short(best['reward'])} to {short(reward)}"
        if reward > best["reward"]:
            status, told = "over-optimised", f"Over-optimised: after step {step} {moved} while {change}."
        else:
            status, told = "declined", f"After step {step} {change}, and {moved}."
    elif quality - 0.5 > judged[-1]["noise"]:  # against the reference, wherever the evaluations began
        status, told = "good", f"Judges prefer its answers to the end: {percent(quality)} % wins."
    else:
        status = "stuck"
        told = f"No gain that the judges see: {percent(quality)} % wins against the reference."
    return _told(status, told, points, step, "judges")


def _by_reward(points: Sequence[Point], verified: bool) -> Optimisation:
    """Without judges: the held-out reward against the training reward, and signs where it rose, unless
    verifiable rewards vouch for the gain."""
    start, end = points[0], points[-1]
    best, last = max(points, key=lambda point: point["reward"]), points[-max(1, len(points) // 4) :]
    reward = _mean([point["reward"] for point in last])
    trained_rose = end["trained"] > best["trained"]
    step = int(best["step"])
    if best not in last and best["reward"] - reward > best_by_chance(len(points)) * best["reward_noise"]:
        fell = f"{short(best['reward'])} to {short(reward)}"
        if trained_rose:
            told = (
                f"Over-optimised: after step {step} the training reward rose while the held-out reward fell"
            )
            return _told("over-optimised", f"{told} from {fell}.", points, step, "reward")
        return _told("declined", f"After step {step} the reward fell from {fell}.", points, step, "reward")
    if not end["reward"] - start["reward"] > math.hypot(start["reward_noise"], end["reward_noise"]):
        moved = f"{short(end['kl'])} nats from the reference"
        told = (
            f"The reward did not rise beyond its noise ({short(start['reward'])} to {short(end['reward'])})"
        )
        return _told("stuck", f"{told}, {moved}.", points, step, "reward")
    if verified:
        told = "What rose can be verified, and is above the best constant answer."
        return _told("good", told, points, step, "verifiable rewards")
    return _by_signs(points, step)


def _by_signs(points: Sequence[Point], best: int) -> Optimisation:
    """The reward rose, and nothing independent of it says whether quality did."""
    found = signs(points[0], points[-1])
    listed = " and ".join(found.values())
    if len(found) >= SIGNS_NEEDED:
        step = _last_sound(points)
        told = f"Probably over-optimised after step {step}: the reward rose, and {listed}."
        return _told("over-optimised", f"{told} No judge was asked (--judges).", points, step)
    if found:
        told = f"One sign of over-optimisation: {listed}."
        asked = "The reward rose, but no judge independent of it was asked (--judges)."
        return _told("one sign", f"{told} {asked}", points, best)
    told = "No sign of over-optimisation was seen; no judge was asked (--judges) to be sure."
    return _told("good", told, points, best)


def best_by_chance(count: int) -> float:
    """Half-widths of a 95 % interval by which the best of several equal numbers may stand above the last."""
    return math.sqrt(2) * math.sqrt(2 * math.log(20 * count)) / 1.96


def collapse(start: Point, end: Point) -> str:
    """How the answers have collapsed, in words; empty where they have not."""
    if end["entropy"] < COLLAPSED_ENTROPY * start["entropy"]:
        return f"its entropy fell from {short(start['entropy'])} to {short(end['entropy'])} nats per token"
    alike = end["variety"] < COLLAPSED_VARIETY * start["variety"]
    if alike and (end["opening"] >= ALL_ALIKE or end["repetition"] >= ALL_ALIKE / 2):
        return (
            f"distinct word pairs fell from {short(start['variety'])} to {short(end['variety'])}, and "
            f"{percent(end['opening'])} % of the answers begin alike"
        )
    if no_longer_end(start, end):
        shares = f"{percent(start['eos'])} % at the start, {percent(end['eos'])} % at the end"
        return f"answers no longer end with EOS ({shares})"
    if end["length"] < COLLAPSED_LENGTH * start["length"] and end["reward"] < start["reward"]:
        return (
            f"answers shrank from {short(start['length'])} to {short(end['length'])} tokens, for less reward"
        )
    return ""


def no_longer_end(start: Point, now: Point) -> bool:
    return start["eos"] >= ENDED and now["eos"] <= UNENDED


def signs(start: Point, now: Point) -> dict[str, str]:
    """What looks like gaming beside a rising reward, by the number it is seen in; nan is not a sign."""
    longer = now["length"] / start["length"] if start["length"] else math.nan
    copied = now["copying"] >= COPIED and now["copying"] - start["copying"] >= COPIED_MORE
    found = {
        f"answers got {'longer' if longer > 1 else 'shorter'}": (
            "length",
            longer >= 1.5 or longer <= 1 / 1.5,
        ),
        "more answers begin alike": ("opening", now["opening"] - start["opening"] >= 0.25),
        "answers are more alike": ("variety", now["variety"] <= 0.75 * start["variety"]),
        "answers repeat themselves": ("repetition", now["repetition"] - start["repetition"] >= 0.1),
        "answers copy their prompt": ("copying", copied),
        "the reward model's heads disagree more": ("spread", now["spread"] >= 1.5 * start["spread"] > 0),
        f"the KL is {FAR:g} nats or more": ("kl", now["distance"] >= FAR),
        "the entropy fell to less than a tenth": (
            "entropy",
            now["entropy"] < COLLAPSED_ENTROPY * start["entropy"],
        ),
        "answers no longer end": ("eos", no_longer_end(start, now)),
    }
    return {name: words for words, (name, seen) in found.items() if seen}


def _last_sound(points: Sequence[Point]) -> int:
    """The last step before the signs that the run ended with, and before a fall of the reward below its
    start."""
    start = points[0]
    sound = [
        point
        for point in points
        if len(signs(start, point)) < SIGNS_NEEDED
        and not collapse(start, point)
        and not start["reward"] - point["reward"] > math.hypot(start["reward_noise"], point["reward_noise"])
    ]
    return int(sound[-1]["step"])


def points_of(metrics: Metrics, samples: Samples = ()) -> list[Point]:
    """The run at its evaluations, in order of steps; the ends also have what only samples show."""
    points = list(_points(metrics))
    if len(points) > 1 and (seen := sampled_ends(samples)) is not None:
        for place, texts in zip((0, -1), seen, strict=True):
            known = {name: value for name, value in points[place].items() if not math.isnan(value)}
            points[place] = {**points[place], **_of_texts(texts), **known}
    return points


def sampled_ends(samples: Samples) -> tuple[Samples, Samples] | None:
    """The samples of the first and of the last quarter of the logged steps; None where they are too few."""
    steps = sorted({row["step"] for row in samples})
    quarter = max(len(steps) // 4, 1)
    if len(steps) < 2:
        return None
    first, last = (set(part) for part in (steps[:quarter], steps[-quarter:]))
    ends = [row for row in samples if row["step"] in first], [row for row in samples if row["step"] in last]
    return ends if min(map(len, ends)) >= ENOUGH_SAMPLES else None


def _of_texts(samples: Samples) -> Point:
    texts, prompts = ([str(row.get(name, "")) for row in samples] for name in ("text", "prompt"))
    return {
        "opening": common_opening(texts),
        "repetition": repetition(texts),
        "copying": copying(prompts, texts),
    }


def _points(metrics: Metrics) -> Iterator[Point]:
    """The evaluations, with the means of the training steps before each; without any, parts of training."""
    steps = metrics.get("step", ())
    began = first_step_row(metrics)
    evaluated = [i for i, value in enumerate(metrics.get("validation/reward", ())) if math.isfinite(value)]
    if not evaluated:
        count = len(steps) - began
        parts = min(PARTS, count)
        cuts = [began + count * number // parts for number in range(parts + 1)] if parts else []
        yield from (_point(metrics, range(a, b), b - 1) for a, b in pairwise(cuts))
        return
    before = began
    for place in evaluated:
        yield _point(metrics, range(before, place + 1), place)
        before = max(place + 1, began)


def _point(metrics: Metrics, rows: range, place: int) -> Point:
    """What is known at one evaluation: held-out numbers as they are, those of training as means over its rows
    (before the first step, of the first ones)."""
    own = {name: metrics[name][place] for name in metrics}
    rows = rows if len(rows) else range(place, min(place + 2, len(metrics["step"])))

    def mean(name: str) -> float:
        return _mean([value for value in (metrics[name][i] for i in rows) if math.isfinite(value)])

    def read(names: Sequence[str]) -> float:
        held_out = [own[name] for name in names if name.startswith("validation/") and name in own]
        trained = [mean(name) for name in names if not name.startswith("validation/") and name in own]
        return next((value for value in (*held_out, *trained) if math.isfinite(value)), math.nan)

    judges = {name.removeprefix("validation/"): own[name] for name in judges_in(own, "validation/")}
    point = {name: read(names) for name, names in WATCHED.items()}
    point["quality"] = held_out_evidence(judges) if judges else math.nan
    widths = [_half_width(own, name) for name in judges]
    noise = _mean([width for width in widths if math.isfinite(width)])
    point["noise"] = noise if math.isfinite(noise) else WITHOUT_INTERVAL
    width = _half_width(own, "reward")
    trained = metrics.get("avg_reward", [math.nan] * len(metrics["step"]))  # none before the first step
    point["reward_noise"] = width if math.isfinite(width) else _interval(trained, rows)
    point["trained"] = mean("avg_reward") if "avg_reward" in own else math.nan
    distance = mean("kl_exact") if "kl_exact" in own else math.nan
    point["distance"] = distance if math.isfinite(distance) else point["kl"]  # without the truncation's cost
    return {**point, "step": own["step"]}


def _half_width(own: Mapping[str, float], name: str) -> float:
    """Of the 95 % interval of an evaluation's number; nan where none was logged."""
    kind, slash, judge = name.partition("/")
    low, high = (own.get(f"validation/{kind}_{end}{slash}{judge}", math.nan) for end in ("low", "high"))
    return (high - low) / 2


def _interval(values: Sequence[float], rows: range) -> float:
    """Half of the 95 % interval of the mean over some steps; 0 where there are too few.

    A part of a run may have a single step, so the variance is that of all steps: half the mean square of the
    differences from one to the next, which a trend hardly changes.
    """
    known = sum(math.isfinite(values[i]) for i in rows)
    finite = [value for value in values if math.isfinite(value)]
    if not known or len(finite) < 2:
        return 0.0
    return 1.96 * math.dist(finite[1:], finite[:-1]) / math.sqrt(2 * (len(finite) - 1) * known)


def _told(
    status: Status, sentence: str, points: Sequence[Point], step: int, decided_by: Decider = "signs"
) -> Optimisation:
    start, end = points[0], points[-1]
    middle = min(points, key=lambda point: abs(point["step"] - step))
    found = signs(start, end)
    rows = [
        Evidence(TITLES[name], start[name], middle[name], end[name], found.get(name, ""))
        for name in WATCHED
        if math.isfinite(end[name])
    ]
    drawn = [(p["kl"], p["quality"], p["step"]) for p in points if math.isfinite(p["kl"] + p["quality"])]
    return Optimisation(status, sentence, step, rows, drawn, decided_by)


TITLES = {name: title_of(names[-1]) for name, names in WATCHED.items()} | {
    "reward": "Reward",  # held-out, or of training
    "quality": "Win rate by judges",
}


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers) if numbers else math.nan
