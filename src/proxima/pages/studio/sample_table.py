"""The studio's table of samples: the same prompts at several steps.

In: rows of samples.jsonl. Out: one row per prompt, one cell per chosen step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from proxima.core.chat_turns import Turn, cut_text, cut_turns, turns_of
from proxima.core.json_record import Record, RecordView

COLUMNS = 4  # steps shown where none are requested
ROWS = 24
TEXT = 2000  # characters of a cell; the microscope shows all of it
TURN = 500  # characters of one turn of an episode


def follow(rows: Sequence[RecordView], wanted: Sequence[int] = ()) -> Record:
    """Followed prompts come first, then those sampled at the most steps; at most `ROWS` rows, texts cut at
    `TEXT`."""
    steps = sorted({row["step"] for row in rows})
    chosen = choose(steps, wanted)
    cells: dict[tuple[str, str, int], dict[int, RecordView]] = {}
    met: Counter[tuple[str, str, int]] = Counter()
    place: Counter[tuple[int, str, str]] = Counter()
    for row in rows:
        kind = text_of(row, "kind")
        prompt = text_of(row, "prompt")
        step = row["step"]
        place[step, kind, prompt] += 1
        key = kind, prompt, place[step, kind, prompt]
        met[key] += 1
        if step in chosen:
            cells.setdefault(key, {})[step] = row
    keys = sorted(
        cells, key=lambda key: (key[0] != "followed", -met[key])
    )  # stable: equal ones stay in the order of the file
    shown = [
        {
            "prompt": cut_text(key[1], TEXT),
            "turns": cut_turns(_turns(key[1], cells[key]), TEXT),
            "kind": key[0],
            "steps": met[key],
            "cells": [_cell(cells[key].get(step)) for step in chosen],
        }
        for key in keys[:ROWS]
    ]
    return {"steps": steps, "chosen": chosen, "rows": shown, "left": len(keys) - len(shown)}


def choose(steps: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """The nearest step to each one requested; else the first, the last and some between them."""
    if not steps:
        return []
    if not wanted:
        most = min(COLUMNS, len(steps))
        return [steps[i * (len(steps) - 1) // max(most - 1, 1)] for i in range(most)]
    return sorted({nearest(steps, step) for step in wanted})


def nearest(steps: Sequence[int], step: int) -> int:
    place = bisect_left(steps, step)
    return min(steps[max(place - 1, 0) : place + 1], key=lambda each: abs(each - step))


def text_of(row: RecordView, name: str) -> str:
    value = row.get(name)
    return value if isinstance(value, str) else ""


def _turns(prompt: str, cells: Mapping[int, RecordView]) -> list[Turn]:
    """Of any step: the same prompt has the same ones."""
    return turns_of(prompt, next(iter(cells.values())).get("turns"))


def _cell(row: RecordView | None) -> Record | None:
    if row is None:
        return None
    replies = cut_turns(turns_of("", row.get("replies")), TURN)
    return {"text": cut_text(text_of(row, "text"), TEXT), "replies": replies, "reward": row.get("reward")}
