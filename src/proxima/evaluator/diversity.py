"""How varied answers are. In: texts. Out: distinct-n over all of them, repetition within each.

Distinct-n is Li et al.'s (2016), repetition Welleck et al.'s seq-rep-4 (2020). By words and marks of the
text, not by tokens, so that models with different tokenizers can be compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

REPEATED = 4  # words of a run that counts as repeated when it comes again


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def distinct(texts: Sequence[str], size: int) -> float:
    """Different runs of `size` words over all such runs of all texts; nan where there is none."""
    runs = [run for text in texts for run in _runs(words(text), size)]
    return len(set(runs)) / len(runs) if runs else math.nan


def repetition(texts: Sequence[str]) -> float:
    """Mean over texts of the share of four-word runs that came before in the same text; texts too short
    for two have none."""
    shares = []
    for text in texts:
        runs = _runs(words(text), REPEATED)
        shares.append(1 - len(set(runs)) / len(runs) if runs else 0.0)
    return math.fsum(shares) / len(shares) if shares else math.nan


def _runs(items: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(items[i : i + size]) for i in range(len(items) - size + 1)]
