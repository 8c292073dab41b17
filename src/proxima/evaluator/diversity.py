"""How varied responses are. In: texts. Out: distinct-n and common opening over all; repetition within each,
and how much of each is copied from its prompt.

Distinct-n follows Li et al. (2016), repetition is seq-rep-4 of Welleck et al. (2020). Both count words and
punctuation marks, not tokens, so that models with different tokenizers can be compared.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

REPEATED = 4  # words of an n-gram that counts as repeated when it occurs again


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def distinct(texts: Sequence[str], size: int) -> float:
    """Distinct n-grams of `size` words over all n-grams of all texts; nan if there is none."""
    ngrams = [each for text in texts for each in _ngrams(words(text), size)]
    return len(set(ngrams)) / len(ngrams) if ngrams else math.nan


def repetition(texts: Sequence[str]) -> float:
    """Mean over texts of the fraction of 4-grams that occurred before in the same text; 0 for texts too
    short to have two."""
    fractions = []
    for text in texts:
        ngrams = _ngrams(words(text), REPEATED)
        fractions.append(1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0)
    return math.fsum(fractions) / len(fractions) if fractions else math.nan


def common_opening(texts: Sequence[str]) -> float:
    """Share of the texts that begin with the most common first word; nan where there is no word."""
    firsts = Counter(found[0] for text in texts if (found := words(text)))
    return max(firsts.values()) / len(texts) if firsts else math.nan


def copying(prompts: Sequence[str], texts: Sequence[str]) -> float:
    """Mean over texts of the fraction of 4-grams that also stand in the prompt; 0 for texts too short to have
    one, nan where there is no text."""
    fractions = []
    for prompt, text in zip(prompts, texts, strict=True):
        ngrams, given = _ngrams(words(text), REPEATED), set(_ngrams(words(prompt), REPEATED))
        fractions.append(sum(each in given for each in ngrams) / len(ngrams) if ngrams else 0.0)
    return math.fsum(fractions) / len(fractions) if fractions else math.nan


def _ngrams(items: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(items[i : i + size]) for i in range(len(items) - size + 1)]
