"""The conclusion and the headline numbers of a report.

In: a `Run`. Out: a conclusion in a sentence, headline numbers with intervals, what was trained on what.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proxima.config import shareable
from proxima.core.json_record import Record
from proxima.core.regular_files import read_file
from proxima.pages.report.findings import RunFinding, find
from proxima.pages.report.run_outcome import HeldOutNumbers, ends, held_out
from proxima.pages.report.short_numbers import short
from proxima.runs import Run, title_of, unit_of

CARDS = ("avg_reward", "kl_exact", "response_length", "eos_rate")  # in training, first against last steps


@dataclass(frozen=True)
class Card:
    """A headline number."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Story:
    """The first screen."""

    conclusion: str
    better: bool | None  # None where it cannot be said
    what: list[str]
    cards: list[Card]
    findings: list[RunFinding]
    warnings: list[Record] = field(default_factory=list)


def tell(run: Run) -> Story:
    metrics = run.metrics()
    measured = held_out(run, metrics)
    findings = find(metrics, run.samples(), measured, run.best_constants)
    better = {"good": True, "bad": False, "open": None}[findings[0].status]
    told = what_was_trained(run)
    return Story(findings[0].sentence, better, told, cards(metrics, measured), findings, run.warnings())


def cards(metrics: Mapping[str, Sequence[float]], measured: HeldOutNumbers | None) -> list[Card]:
    """Before and after of what matters, where the run has it."""
    made = []
    if measured is not None:
        change = f"{short(measured.first)} → {short(measured.last.value)}"
        made.append(Card(title_of("validation/reward"), change, measured.last.words() or measured.source))
        if (won := measured.win_rate) is not None:
            made.append(Card(title_of("validation/win_rate"), won.rate(), won.words(percents=True)))
    for name in CARDS:
        first, last = ends(metrics.get(name, ()))
        if first.steps:
            change = f"{short(first.mean)} → {short(last.mean)}"
            several = (
                f"mean of the first and last {first.steps} steps"
                if first.steps > 1
                else "first and last step"
            )
            made.append(Card(title_of(name), change, f"{unit_of(name)}, {several}"))
    return made


def what_was_trained(run: Run) -> list[str]:
    """Sentences for someone who does not know the project."""
    config, steps = run.config, run.steps
    model = str(config.get("model_name", "a language model"))
    size = config.get("batch_size")
    several = config.get("num_generations", 1)
    answers = ""
    if isinstance(size, int) and isinstance(several, int):
        answers = f", {steps * size * several:,} responses in all"
    told = [
        f"The language model {model} answered prompts, each response was scored, and PPO made responses with "
        "high scores more likely: "
        f"{steps:,} step{'s' if steps != 1 else ''} of {size or '?'} prompts{answers}."
    ]
    if data := read_data(run):
        count = f"{data['prompts']:,} prompts" if isinstance(data.get("prompts"), int) else "prompts"
        held_out = f"; held out: {data['validation']}" if data.get("validation") else ""
        told.append(f"Prompts: {count} from {data.get('data', '?')}{held_out}.")
    if rewards := [
        reward_words(reward) for reward in config.get("rewards") or () if isinstance(reward, dict)
    ]:
        told.append(f"Reward: {' plus '.join(rewards)}.")
    if isinstance(coef := config.get("kl_coef"), (int, float)) and coef:
        told.append(
            f"A penalty of {coef:g} per nat of KL keeps it close to the reference, the model it started as."
        )
    return [shareable(each) for each in told]


def reward_words(reward: Mapping[str, object]) -> str:
    weight, source = reward.get("weight", 1.0), reward.get("source", "?")
    options = reward.get("options") or {}
    given = (
        f" ({', '.join(f'{key} {value}' for key, value in options.items())})"
        if isinstance(options, dict) and options
        else ""
    )
    return f"{'' if weight == 1 else f'{weight} × '}{source}{given}"


def read_data(run: Run) -> Record:
    """What `proxima train` noted of its data; empty where it was not the command that trained."""
    try:
        noted = json.loads(read_file(run.path / "data.json", follow=False))
    except (OSError, ValueError, RecursionError):
        return {}
    return noted if isinstance(noted, dict) else {}
