"""Numbers for sentences, in few digits."""

from __future__ import annotations

import math


def short(value: float, digits: int = 3) -> str:
    """A number for a sentence, in few digits."""
    if not math.isfinite(value):
        return "–"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    return f"{float(f'{value:.{digits}g}'):,g}"


def percent(value: float) -> str:
    return f"{100 * value:.0f}" if math.isfinite(value) else "–"
