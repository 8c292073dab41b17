"""A comparison for the terminal. In: stages. Out: one line per stage, then what differs beside them, then
the outcome."""

from __future__ import annotations

import math

from proxima.core.terminal_text import visible
from proxima.tools.replay.stage_comparison import Comparison, Stage

LONGEST = 60  # characters of a setting that is shown


def stage_lines(comparison: Comparison) -> list[str]:
    """Lines without any character that could steer a terminal."""
    lines = [f"{stage.name:<24}{stage.result:<18}{note(stage)}".rstrip() for stage in comparison.stages]
    for title, rows in (("setting", comparison.settings), ("environment", comparison.environment)):
        lines += [f"{title} {name}: {_short(left)} and {_short(right)}" for name, left, right in rows]
    expected = (
        "same kind of machine, same versions and code: the same bits are expected"
        if comparison.expects_bits
        else "another machine, other versions or other code: expected within the tolerance "
        + ", ".join(f"{name} {value:g}" for name, value in sorted(comparison.tolerance.items()))
    )
    return [visible(line) for line in [*lines, expected, comparison.sentence]]


def note(stage: Stage) -> str:
    """What is to be said of a stage: its largest difference, or why it was not recomputed."""
    if stage.worst is None:
        return stage.why
    worst = stage.worst
    measured = worst.left and math.isfinite(worst.size)
    return f"{worst}; {worst.size:.3g} apart, {worst.limit:.3g} allowed" if measured else str(worst)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
