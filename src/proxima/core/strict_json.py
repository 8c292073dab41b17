"""JSON as its standard has it. In: a text that a model wrote. Out: its value; a ValueError where Python's own
reader would guess."""

from __future__ import annotations

import json
from typing import NoReturn

from proxima.core.json_record import Record


def read_strict_json(text: str) -> object:
    """Without NaN and without the same key twice. A RecursionError where it is nested too deeply."""
    return json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _once(pairs: list[tuple[str, object]]) -> Record:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)
