"""How a run came out, in numbers. In: its metrics, and what `proxima eval` found. Out: before and after with
intervals, and whether it got better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxima.pages.report.report_curves import interval_names
from proxima.pages.report.short_numbers import percent, short
from proxima.runs import Run, first_step_row

NOTHING = "No step has been logged yet."
ENOUGH = 5  # steps that a mean needs for an interval


@dataclass(frozen=True)
class StepMean:
    """The mean of some steps, and the 95 % interval of it where there are enough of them."""

    mean: float
    error: float
    steps: int

    @classmethod
    def of(cls, values: Sequence[float]) -> StepMean:
        known = [value for value in values if math.isfinite(value)]
        if not known:
            return cls(math.nan, math.nan, 0)
        mean = sum(known) / len(known)
        spread = math.sqrt(sum((value - mean) ** 2 for value in known) / max(len(known) - 1, 1))
        return cls(
            mean, 1.96 * spread / math.sqrt(len(known)) if len(known) >= ENOUGH else math.nan, len(known)
        )

    def __str__(self) -> str:
        return short(self.mean) if math.isnan(self.error) else f"{short(self.mean)} ± {short(self.error, 2)}"


@dataclass(frozen=True)
class HeldOutNumbers:
    """What held-out prompts show: by `proxima eval` where it was run, else the evaluations before the first
    step (an older run's reference) and after the last one."""

    first: float
    last: Interval
    win_rate: Interval | None
    source: str


@dataclass(frozen=True)
class Interval:
    """A number and the ends of its 95 % interval, nan if there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def words(self, percents: bool = False) -> str:
        """The interval alone; empty if there is none."""
        if not math.isfinite(self.low + self.high):
            return ""
        return (
            f"95 %: {percent(self.low)} to {percent(self.high)} %"
            if percents
            else f"95 %: {short(self.low)} to {short(self.high)}"
        )

    def above(self, other: float) -> bool | None:
        """None if the interval contains it; without an interval the value alone decides."""
        if not math.isfinite(self.low + self.high):
            return None if self.value == other else self.value > other
        return True if self.low > other else False if self.high < other else None

    def rate(self) -> str:
        return f"{percent(self.value)} %"


def held_out(run: Run, metrics: Mapping[str, Sequence[float]]) -> HeldOutNumbers | None:
    asked = run.evaluation or {}
    old, new, rate = (_floats(asked.get(name)) for name in ("reference", "policy", "win_rate"))
    if "avg_reward" in old and "avg_reward" in new:
        last = Interval(new["avg_reward"], new.get("reward_low", math.nan), new.get("reward_high", math.nan))
        won = (
            Interval(rate["rate"], rate.get("low", math.nan), rate.get("high", math.nan))
            if "rate" in rate
            else None
        )
        return HeldOutNumbers(old["avg_reward"], last, won, "by `proxima eval`")
    known = [i for i, value in enumerate(metrics.get("validation/reward", ())) if math.isfinite(value)]
    if not known:
        return None
    column = metrics["validation/reward"]
    began = first_step_row(metrics) > 0 and known[0] == 0
    reference = [value for value in metrics.get("validation/reference_reward", ()) if math.isfinite(value)]
    first = reference[-1] if reference and not began else column[known[0]]
    source = "the reference, and the last evaluation" if reference else "first and last evaluation"
    if began:
        source = "before the first step, and the last evaluation"
    rates = [i for i, value in enumerate(metrics.get("validation/win_rate", ())) if math.isfinite(value)]
    won = _logged(metrics, "validation/win_rate", rates[-1]) if rates else None
    last = _logged(metrics, "validation/reward", known[-1])
    return HeldOutNumbers(first, last, won, source)


def judge(metrics: Mapping[str, Sequence[float]], measured: HeldOutNumbers | None) -> tuple[str, bool | None]:
    """Whether it got better: by held-out prompts if there are any, else by the training reward."""
    if measured is not None:
        interval = f" ({measured.last.words()})" if measured.last.words() else ""
        told = (
            f"On held-out prompts the reward went from {short(measured.first)} to "
            f"{short(measured.last.value)}{interval}"
        )
        if measured.win_rate is None:
            return f"{told}.", measured.last.above(measured.first)
        interval = f" ({measured.win_rate.words(percents=True)})" if measured.win_rate.words() else ""
        return (
            f"{told}; by this reward its answers beat those of the reference {measured.win_rate.rate()} of "
            f"the time{interval}.",
            (True if measured.win_rate.low > 0.5 else False if measured.win_rate.high < 0.5 else None),
        )
    first, last = ends(metrics.get("avg_reward", ()))
    if not first.steps:
        steps = steps_of(metrics)
        none = f"{steps} steps were logged, and none of them has a reward." if steps else NOTHING
        return none, None
    if len(_finite(metrics["avg_reward"])) == 1:
        return f"One step was logged; its reward was {short(first.mean)}.", None
    change = f"from {first} to {last}"
    if math.isnan(first.error + last.error):
        return f"The training reward went {change}; so few steps cannot tell a change from noise.", None
    if last.mean == first.mean:
        return f"The training reward stayed at {last}.", None
    if abs(last.mean - first.mean) < math.hypot(first.error, last.error):
        return f"The training reward went {change}: no more than its noise.", None
    rose = last.mean > first.mean
    return f"The training reward {'rose' if rose else 'fell'} {change}.", rose


def steps_of(metrics: Mapping[str, Sequence[float]]) -> int:
    """Steps that were logged, with a reward or without."""
    return len(metrics.get("step", ())) - first_step_row(metrics)


def ends(values: Sequence[float]) -> tuple[StepMean, StepMean]:
    """The first and the last tenth of a curve, at least five steps each where there are ten."""
    known = _finite(values)
    width = max(len(known) // 10, min(ENOUGH, len(known) // 2), 1)
    return StepMean.of(known[:width]), StepMean.of(known[-width:])


def _logged(metrics: Mapping[str, Sequence[float]], name: str, place: int) -> Interval:
    """A metric at one step, with its interval where one was logged."""
    names = interval_names(metrics, name)
    low, high = (metrics[end][place] for end in names) if names else (math.nan, math.nan)
    return Interval(metrics[name][place], low, high)


def _floats(values: object) -> dict[str, float]:
    """The finite numbers of a mapping, and nothing else."""
    if not isinstance(values, dict):
        return {}
    return {k: float(v) for k, v in values.items() if isinstance(v, (int, float)) and abs(v) < math.inf}


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
