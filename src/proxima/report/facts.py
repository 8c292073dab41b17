"""What a run comes to. In: a `Run`. Out: a verdict in a sentence, headline numbers with intervals, what was trained on what."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxima.runs import Run

ENOUGH = 5  # steps in a stretch, for an interval


@dataclass(frozen=True)
class Card:
    """A headline number."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Story:
    """The first screen."""

    verdict: str
    better: bool | None  # None where it cannot be said
    what: list[str]
    cards: list[Card]
    warnings: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Stretch:
    """The mean of some steps, and the 95 % interval of it where there are enough of them."""

    mean: float
    error: float
    steps: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Stretch:
        known = [value for value in values if math.isfinite(value)]
        if not known:
            return cls(math.nan, math.nan, 0)
        mean = sum(known) / len(known)
        spread = math.sqrt(sum((value - mean) ** 2 for value in known) / max(len(known) - 1, 1))
        return cls(mean, 1.96 * spread / math.sqrt(len(known)) if len(known) >= ENOUGH else math.nan, len(known))

    def __str__(self) -> str:
        return short(self.mean) if math.isnan(self.error) else f"{short(self.mean)} ± {short(self.error, 2)}"


def tell(run: Run) -> Story:
    metrics = run.metrics()
    verdict, better = judge(metrics)
    return Story(verdict, better, what_was_trained(run, metrics), cards(run, metrics), run.warnings())


def judge(metrics: Mapping[str, Sequence[float]]) -> tuple[str, bool | None]:
    """Whether the reward rose, by held-out prompts where there are any."""
    held_out = _finite(metrics.get("validation/reward", ()))
    if len(held_out) > 1:
        rose = max(held_out) > held_out[0]
        best = f"; its best was {short(max(held_out))}" if max(held_out) > held_out[-1] else ""
        return f"On held-out prompts the reward went from {short(held_out[0])} to {short(held_out[-1])}{best}.", rose
    first, last = ends(metrics.get("avg_reward", ()))
    if not first.steps:
        return "No step has been logged yet.", None
    if first.steps + last.steps > len(_finite(metrics["avg_reward"])):
        return f"One step was logged; its reward was {short(first.mean)}.", None
    change = f"from {first} to {last}"
    if math.isnan(first.error + last.error):
        return f"The reward in training went {change}; so few steps cannot tell change from noise.", None
    if abs(last.mean - first.mean) < math.hypot(first.error, last.error):
        return f"The reward in training went {change}: no more than its noise.", None
    rose = last.mean > first.mean
    return f"The reward in training {'rose' if rose else 'fell'} {change}.", rose


def ends(values: Sequence[float]) -> tuple[Stretch, Stretch]:
    """The first and the last tenth of a curve, at least five steps each where there are ten."""
    known = _finite(values)
    width = max(len(known) // 10, min(ENOUGH, len(known) // 2), 1)
    return Stretch.of(known[:width]), Stretch.of(known[-width:])


def cards(run: Run, metrics: Mapping[str, Sequence[float]]) -> list[Card]:
    """Before and after of what matters, where the run has it."""
    made = []
    held_out = _finite(metrics.get("validation/reward", ()))
    first, last = ends(metrics.get("avg_reward", ()))
    if len(held_out) > 1:
        made.append(Card("Reward, held-out", f"{short(held_out[0])} → {short(held_out[-1])}", f"best {short(max(held_out))}"))
    if first.steps:
        several = f"mean of the first and last {first.steps} steps" if first.steps > 1 else "first and last step"
        made.append(Card("Reward in training", f"{short(first.mean)} → {short(last.mean)}", several))
    if rate := win_rate(run, metrics):
        made.append(rate)
    for label, name, unit in (
        ("Distance from the start", "kl_exact", "nats of KL a text"),
        ("Length", "response_length", "tokens a text"),
        ("End by themselves", "eos_rate", "share of texts"),
    ):
        begin, end = ends(metrics.get(name, ()))
        if begin.steps:
            made.append(Card(label, f"{short(begin.mean)} → {short(end.mean)}", unit))
    return made


def win_rate(run: Run, metrics: Mapping[str, Sequence[float]]) -> Card | None:
    """By `proxima eval` where it was asked, else the last one logged while training."""
    found = (run.evaluation or {}).get("win_rate")
    if isinstance(found, dict) and all(isinstance(found.get(key), (int, float)) for key in ("rate", "low", "high")):
        interval = f"95 %: {percent(found['low'])} to {percent(found['high'])} %"
        return Card("Wins against the start", f"{percent(found['rate'])} %", f"{interval}, by proxima eval")
    name = "validation/win_rate"
    known = [i for i, rate in enumerate(metrics.get(name, ())) if math.isfinite(rate)]
    if not known:
        return None
    place = known[-1]
    bounds = [
        (metrics[name + low][place], metrics[name + high][place])
        for low, high in (("/low", "/high"), ("_low", "_high"))
        if name + low in metrics and name + high in metrics
    ]
    note = f"95 %: {percent(bounds[0][0])} to {percent(bounds[0][1])} %" if bounds else "on held-out prompts"
    return Card("Wins against the start", f"{percent(metrics[name][place])} %", note)


def what_was_trained(run: Run, metrics: Mapping[str, Sequence[float]]) -> list[str]:
    """Sentences for someone who knows nothing of the project."""
    config, steps = run.config, len(metrics["step"])
    model = str(config.get("model_name", "a language model"))
    size = config.get("batch_size")
    answers = f", {steps * size:,} texts in all" if isinstance(size, int) else ""
    told = [
        f"The language model {model} wrote texts for prompts, each text got a score, and PPO made what scored well likelier: "
        f"{steps:,} step{'s' if steps != 1 else ''} of {size or '?'} prompts{answers}."
    ]
    if data := read_data(run):
        count = f"{data['prompts']:,} prompts" if isinstance(data.get("prompts"), int) else "prompts"
        held_out = f"; held out: {data['validation']}" if data.get("validation") else ""
        told.append(f"Its prompts: {count} of {data.get('data', '?')}{held_out}.")
    if rewards := [reward_words(reward) for reward in config.get("rewards") or () if isinstance(reward, dict)]:
        told.append(f"Its score: {' plus '.join(rewards)}.")
    if isinstance(coef := config.get("kl_coef"), (int, float)) and coef:
        told.append(f"Every nat of distance from the model it began as costs {coef:g}, so that it keeps its language.")
    return [shareable(each) for each in told]


def reward_words(reward: Mapping[str, Any]) -> str:
    weight, source = reward.get("weight", 1.0), reward.get("source", "?")
    options = reward.get("options") or {}
    given = (
        f" ({', '.join(f'{key} {value}' for key, value in options.items())})" if isinstance(options, dict) and options else ""
    )
    return f"{'' if weight == 1 else f'{weight} × '}{source}{given}"


def read_data(run: Run) -> dict[str, Any]:
    """What `proxima train` noted of its data; empty where it was not the command that trained."""
    try:
        noted = json.loads((run.path / "data.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return noted if isinstance(noted, dict) else {}


def shareable(text: str) -> str:
    """Without what an address may carry that is not for all: a name and password, or a key."""
    text = re.sub(r"(?<=://)[^/@\s]+@", "…@", text)
    return re.sub(r"(?i)([?&][\w-]*(?:key|token|secret|password|auth|sig)[\w-]*=)[^&\s'\"]+", r"\1…", text)


def short(value: float, digits: int = 3) -> str:
    """A number for a sentence."""
    if not math.isfinite(value):
        return "–"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    return f"{float(f'{value:.{digits}g}'):,g}"


def percent(value: float) -> str:
    return f"{100 * value:.0f}" if math.isfinite(value) else "–"


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
