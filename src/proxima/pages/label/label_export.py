"""Answers as training data, and a summary: agreement, and how annotators did on control questions. In: a
store. Out: preferences or ratings as JSONL, and a summary with the agreement.

Preferences, one row per item: of the answers that are not skips, a side wins if it has more votes than the
other side and more than "tie"; items without a winner leave no row. Ratings: the mean over annotators. With
`every_answer`, one row per answer.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from proxima.core.json_record import Record, RecordView
from proxima.pages.label.agreement import cohen_kappa, krippendorff_alpha, raw_agreement
from proxima.pages.label.label_store import Item, LabelAnswer, Store


def export(store: Store, path: str | Path, every_answer: bool = False) -> int:
    """Write the rows to a .jsonl file, whole or not at all; how many there are."""
    path = Path(path)
    if path.suffix != ".jsonl":
        raise ValueError(f"{path} must end in .jsonl")
    known = store.controls()  # their answers are known, and say how annotators do
    items = [item for item in store.items() if item.id not in known]
    rows = rows_of(items, store.answers(), every_answer)
    if not rows:
        what = "item has a winner" if store.mode == "pairs" else "item has a rating"
        raise ValueError(f"{store.path} holds nothing to export: no {what} yet")
    write_jsonl(path, rows)
    return len(rows)


def rows_of(
    items: Sequence[Item], answers: Sequence[LabelAnswer], every_answer: bool = False
) -> list[Record]:
    """The exported rows, in the order of the items."""
    given: dict[int, list[LabelAnswer]] = {item.id: [] for item in items}
    for answer in answers:
        if answer.choice != "skip" and answer.item in given:
            given[answer.item].append(answer)
    groups: list[tuple[Item, list[LabelAnswer]]] = []
    for item in items:
        if every_answer:
            groups += [(item, [one]) for one in given[item.id]]
        else:
            groups.append((item, given[item.id]))
    rows = [
        _preference(item, group) if item.mode == "pairs" else _rating(item, group)
        for item, group in groups
        if group
    ]
    return [row for row in rows if row]


def _preference(item: Item, answers: Sequence[LabelAnswer]) -> Record | None:
    votes = Counter(answer.choice for answer in answers)
    sides = {"a": (item.a, item.a_ended), "b": (item.b, item.b_ended)}
    chosen, rejected = ("a", "b") if votes["a"] > votes["b"] else ("b", "a")
    if votes[chosen] <= max(votes[rejected], votes["tie"]):
        return None
    return {
        "prompt": item.prompt,
        "chosen": sides[chosen][0],
        "rejected": sides[rejected][0],
        "chosen_ended": sides[chosen][1],
        "rejected_ended": sides[rejected][1],
        "annotator": _names(answers),
        "votes": {"chosen": votes[chosen], "rejected": votes[rejected], "tie": votes["tie"]},
        **_notes(answers),
    }


def _rating(item: Item, answers: Sequence[LabelAnswer]) -> Record:
    return {
        "prompt": item.prompt,
        "completion": item.a,
        "rating": sum(int(answer.choice) for answer in answers) / len(answers),
        "ended": item.a_ended,
        "annotator": _names(answers),
        "votes": len(answers),
        **_notes(answers),
    }


def _names(answers: Sequence[LabelAnswer]) -> str:
    return ", ".join(answer.annotator for answer in answers)


def _notes(answers: Sequence[LabelAnswer]) -> Record:
    notes = [answer.note for answer in answers if answer.note]
    return {"notes": notes} if notes else {}


def write_jsonl(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """A new file beside it, then a rename: a reader sees the old file or the new one, never a half."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with part.open(
            "x", encoding="utf-8", newline="\n"
        ) as file:  # as any new file: who may read it, the umask says
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def agreement_of(answers: Sequence[LabelAnswer], mode: str) -> Record:
    """How far annotators agree; skips count as no answer, a tie is a value of its own."""
    values: dict[int, Record] = {}
    for answer in answers:
        if answer.choice != "skip":
            value = answer.choice if mode == "pairs" else int(answer.choice)
            values.setdefault(answer.item, {})[answer.annotator] = value
    shared = [value for value in values.values() if len(value) > 1]
    metric = "nominal" if mode == "pairs" else "ordinal"
    return {
        "shared": len(shared),
        "raw": raw_agreement(shared),
        "kappa": cohen_kappa(shared),
        "alpha": krippendorff_alpha(shared, metric),
        "metric": metric,
    }


def summarize(store: Store) -> Record:
    """Counts and agreement; control questions are counted on their own."""
    known, every = store.controls(), store.answers()
    items = [item for item in store.items() if item.id not in known]
    answers = [answer for answer in every if answer.item not in known]
    summary: Record = {
        "items": len(items),
        "answers": len(answers),
        "annotators": dict(Counter(answer.annotator for answer in answers)),
        "choices": dict(sorted(Counter(answer.choice for answer in answers).items())),
        **agreement_of(answers, store.mode),
        "rows": len(rows_of(items, answers)),
        "controls": measured_by_controls(every, known),
        "notes": sum(bool(answer.note) for answer in every),
    }
    if store.mode == "pairs":
        decided = [answer for answer in answers if answer.choice in ("a", "b")]
        first = sum((answer.choice == "b") == answer.swapped for answer in decided)
        summary["first_share"] = first / len(decided) if decided else None
        summary["wins"] = _wins(items, decided)
    return summary


def measured_by_controls(
    answers: Sequence[LabelAnswer], known: Mapping[int, str]
) -> dict[str, dict[str, int]]:
    """By annotator: control questions answered, and how many of them right. A skip is not an answer, a tie is
    wrong, and a rating is right within one point."""
    found: dict[str, dict[str, int]] = {}
    for answer in answers:
        if answer.item in known and answer.choice != "skip":
            counts = found.setdefault(answer.annotator, {"asked": 0, "right": 0})
            counts["asked"] += 1
            counts["right"] += _is_right(answer.choice, known[answer.item])
    return found


def _is_right(choice: str, expected: str) -> bool:
    if expected in ("a", "b"):
        return choice == expected
    return choice.isdigit() and expected.isdigit() and abs(int(choice) - int(expected)) <= 1


def _wins(items: Sequence[Item], decided: Sequence[LabelAnswer]) -> dict[str, int]:
    """Answers won by each source, over items whose sides have different sources."""
    sources = {
        item.id: {"a": item.a_model, "b": item.b_model or ""}
        for item in items
        if item.a_model != item.b_model
    }
    won = Counter(sources[answer.item][answer.choice] for answer in decided if answer.item in sources)
    return dict(won)


def in_words(summary: RecordView) -> list[str]:
    """The summary as lines for a terminal."""
    by = ", ".join(f"{name} {count}" for name, count in summary["annotators"].items())
    lines = [f"{summary['answers']} answers to {summary['items']} items" + (f" ({by})" if by else "")]
    if special := [
        f"{name} {summary['choices'][name]}" for name in ("tie", "skip") if name in summary["choices"]
    ]:
        lines.append("of these " + ", ".join(special))
    if summary.get("first_share") is not None:
        lines.append(f"the one shown first was chosen in {summary['first_share']:.0%} of decided answers")
    if summary.get("wins"):
        lines.append(
            "won: " + ", ".join(f"{name or 'unnamed'} {count}" for name, count in summary["wins"].items())
        )
    lines += [
        f"control questions: {name} {counts['right']} of {counts['asked']} right"
        for name, counts in summary["controls"].items()
    ]
    if not summary["shared"]:
        return [*lines, "agreement: not measured, no item was answered by two annotators"]
    shown = [f"raw {summary['raw']:.2f}"]
    if summary["kappa"] is not None:
        shown.append(f"Cohen's kappa {summary['kappa']:.2f}")
    alpha = (
        "not defined (everyone gave one and the same answer)"
        if summary["alpha"] is None
        else f"{summary['alpha']:.2f}"
    )
    shown.append(f"Krippendorff's alpha {alpha} ({summary['metric']})")
    return [*lines, f"agreement on {summary['shared']} shared items: " + ", ".join(shown)]
