"""How far annotators agree. In: for each item, annotator -> value. Out: raw agreement, Cohen's kappa,
Krippendorff's alpha.

    raw    share of pairs of answers to one item that are equal
    kappa  (p_o - p_e) / (1 - p_e): two annotators; p_o raw, p_e expected from how often each uses each value
           (Cohen 1960)
    alpha  1 - D_o / D_e: any number of annotators, answers may be missing; D_o mean squared distance between
           values of one item, D_e between any two values
           (Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability")

1 = they always agree, 0 = no more than by chance; None = undefined: nobody shared an item, or only one
value was ever used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any, TypeAlias

Answer: TypeAlias = Any
"""What an annotator chose: a text, or a number where a metric counts or subtracts."""
Ratings = Sequence[Mapping[str, Answer]]
"""One mapping per item, from annotator to value."""


def raw_agreement(items: Ratings) -> float | None:
    pairs = [left == right for item in items for left, right in combinations(item.values(), 2)]
    return sum(pairs) / len(pairs) if pairs else None


def cohen_kappa(items: Ratings) -> float | None:
    """Over the items that both answered; there must be exactly two annotators."""
    names = sorted({name for item in items for name in item})
    both = [(item[names[0]], item[names[1]]) for item in items if len(item) == 2] if len(names) == 2 else []
    if not both:
        return None
    observed = sum(left == right for left, right in both) / len(both)
    first, second = Counter(left for left, _ in both), Counter(right for _, right in both)
    expected = sum(first[value] * second[value] for value in first) / len(both) ** 2
    return (observed - expected) / (1 - expected) if expected < 1 else None


def krippendorff_alpha(items: Ratings, metric: str = "nominal") -> float | None:
    """`metric`: nominal (equal or not), ordinal (ranks), interval (differences of numbers)."""
    coincidences: Counter[tuple[Answer, Answer]] = Counter()
    for item in items:
        for pair in permutations(item.values(), 2):
            coincidences[pair] += 1 / (len(item) - 1)  # type: ignore[assignment]  # each value counts once per item
    totals: Counter[Answer] = Counter()
    for (left, _), weight in coincidences.items():
        totals[left] += weight
    count = sum(totals.values())
    distance = _distance(metric, totals)
    observed = sum(weight * distance(left, right) for (left, right), weight in coincidences.items())
    expected = sum(
        totals[left] * totals[right] * distance(left, right) for left in totals for right in totals
    )
    return 1 - (count - 1) * observed / expected if expected else None


def _distance(metric: str, totals: Mapping[Answer, float]) -> Callable[[Answer, Answer], float]:
    """Squared distance of two values, by metric."""

    def ordinal(left: Answer, right: Answer) -> float:
        low, high = sorted((left, right))
        between = sum(weight for value, weight in totals.items() if low <= value <= high)
        return (between - (totals[left] + totals[right]) / 2) ** 2

    metrics: dict[str, Callable[[Answer, Answer], float]] = {
        "nominal": lambda left, right: float(left != right),
        "ordinal": ordinal,
        "interval": lambda left, right: (left - right) ** 2,
    }
    if metric not in metrics:
        raise ValueError(f"metric ({metric!r}) must be one of {', '.join(metrics)}")
    return metrics[metric]
