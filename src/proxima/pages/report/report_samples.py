"""Samples in a report: which are shown, before and after, and their token records.

In: a run. Out: token records of a few steps within a bound on size; texts before and after.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from proxima.core.chat_turns import Turn, checked_turns, cut_text, cut_turns, turns_of
from proxima.core.json_record import Record, RecordView
from proxima.runs import Run

STEPS = 12  # most steps whose tokens are in a report
BYTES = 3_000_000  # most that these may take
LONGEST_TOKEN, MOST_TOKENS = 400, 2000
PAIRS = 8


@dataclass(frozen=True)
class Pair:
    """One prompt, answered before and after."""

    prompt: str
    before: str
    after: str
    before_score: float | None
    after_score: float | None
    turns: list[Turn] = field(default_factory=list)
    """The prompt as a conversation; none where it is plain text."""
    before_turns: list[Turn] = field(default_factory=list)  # of an episode
    after_turns: list[Turn] = field(default_factory=list)


def embedded_tokens(run: Run) -> list[Record]:
    """Steps with their samples, at most `STEPS` spread over the run, fewer where they are large; the first
    and the last always.

    Of samples that are larger still the first stay; `left_out` counts the others.
    """
    logged = run.token_steps()
    if not logged:
        return []
    largest = max(sum(map(_size, _samples(run, step))) for step in {logged[0], logged[-1]})
    count = min(STEPS, len(logged), max(BYTES // max(largest, 1), 2))
    chosen = sorted({logged[round(i * (len(logged) - 1) / max(count - 1, 1))] for i in range(count)})
    steps = []
    for step in chosen:
        samples, sizes = _samples(run, step), 0
        kept: list[Record] = []
        for sample in samples:
            sizes += _size(sample)
            if kept and sizes > BYTES // count:
                break
            kept.append(sample)
        if kept:
            steps.append(
                {"label": f"step {step}", "step": step, "samples": kept, "left_out": len(samples) - len(kept)}
            )
    return steps


def _samples(run: Run, step: int) -> list[Record]:
    return [cut(sample) for sample in run.tokens(step)]


def _size(sample: RecordView) -> int:
    return len(json.dumps(sample, ensure_ascii=False).encode("utf-8", "replace"))


def cut(sample: RecordView) -> Record:
    """A sample whose texts are bounded; numbers stay as they are stored."""
    return {
        **{name: sample[name] for name in ("kind", "reward", "rewards")},
        "ended": sample.get("ended"),
        "prompt": cut_text(sample["prompt"]),
        "turns": cut_turns(turns_of(sample["prompt"], sample.get("turns"))),
        "ids": list(sample.get("ids") or [])[:MOST_TOKENS] or None,
        "tokens": [cut_text(token, LONGEST_TOKEN) for token in sample["tokens"][:MOST_TOKENS]],
        "observed": [place for place in sample.get("observed") or [] if place < MOST_TOKENS],
        "columns": {name: values[:MOST_TOKENS] for name, values in sample["columns"].items()},
    }


def before_and_after(run: Run) -> tuple[str, list[Pair]]:
    """Where the pairs come from, in words, and the pairs: by `proxima eval`, else followed prompts, first
    against last step."""
    evaluated = (run.evaluation or {}).get("samples")
    if isinstance(evaluated, list) and evaluated and all(isinstance(row, dict) for row in evaluated):
        rows = [_evaluated(row) for row in evaluated[:PAIRS]]
        return "Responses to held-out prompts before and after training, by `proxima eval`.", rows
    steps = run.token_steps()
    if len(steps) > 1:
        old, new = (
            [s for s in run.tokens(step) if s["kind"] == "followed"] for step in (steps[0], steps[-1])
        )
        answers = dict(zip(_numbered(new), new, strict=True))
        rows = [
            Pair(
                *(a["prompt"], a["text"], b["text"], a["reward"], b["reward"], a.get("turns", [])),
                *(a.get("replies", []), b.get("replies", [])),
            )
            for number, a in zip(_numbered(old), old, strict=True)
            if (b := answers.get(number)) is not None
        ]
        if rows:
            first = f"at step {steps[0]}" if steps[0] else "before the first step"
            return f"The same prompts, answered {first} and at step {steps[-1]}.", rows[:PAIRS]
    return "", []


def _numbered(samples: Sequence[RecordView]) -> list[tuple[str, int]]:
    """The prompt of each, and how many equal ones come before it: a game is asked by the same words."""
    seen: Counter[str] = Counter()
    found = []
    for sample in samples:
        found.append((sample["prompt"], seen[sample["prompt"]]))
        seen[sample["prompt"]] += 1
    return found


def _evaluated(row: RecordView) -> Pair:
    prompt = str(row.get("prompt"))
    before, after = str(row.get("reference")), str(row.get("policy"))
    scores = (_score(row, "reference_reward"), _score(row, "policy_reward"))
    said = (checked_turns(row.get(name)) for name in ("reference_turns", "policy_turns"))
    return Pair(prompt, before, after, *scores, turns_of(prompt, row.get("turns")), *said)


def _score(row: RecordView, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else None
