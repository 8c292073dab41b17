"""The small curve beside a run in the studio's list.

In: metrics.jsonl of any length. Out: a few points of it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from proxima.core.regular_files import open_file
from proxima.runs import Point, thin

LINE = 8192  # bytes read at each place: several lines of metrics


def glance(path: Path, name: str, points: int = 48) -> list[Point]:
    """[step, value] at evenly spaced places of a long file, so that its length costs no time; all of a
    short one, thinned."""
    found: dict[float, float] = {}
    try:
        with open_file(path, follow=False) as file:
            size = file.seek(0, 2)
            if size <= points * LINE:
                file.seek(0)
                found = _numbers(file.read().split(b"\n")[:-1], name)
            else:
                for place in range(points):
                    file.seek(max(place * size // points - 1, 0))
                    lines = file.read(LINE).split(b"\n")
                    found |= dict(list(_numbers(lines[1:3] if place else lines[:2], name).items())[:1])
                file.seek(size - LINE)
                found |= _numbers(file.read().split(b"\n")[-2:-1], name)
    except OSError:
        return []
    rows = sorted(found.items())
    return thin([step for step, _ in rows], [value for _, value in rows], 2 * points)


def _numbers(lines: list[bytes], name: str) -> dict[float, float]:
    """Step -> value of the lines that are whole."""
    found = {}
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and _is_number(record.get("step")) and _is_number(record.get(name)):
            found[record["step"]] = record[name]
    return found


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False
