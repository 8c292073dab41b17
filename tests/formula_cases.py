"""Ragged batches for the formula tests, and their two spellings as plain dicts.

A batch is a list of sequences, a sequence a list of tokens, a token a dict of floats.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st

Batch = list[list[dict[str, float]]]

GRID = (0.0, 0.37, 0.95, 1.0)  # for gamma and for lam, with both ends
LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=5)

# The same cases on every run; no explain phase, which takes a minute on a failure.
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
sweep = settings(max_examples=50, deadline=None, derandomize=True, phases=PHASES)
short_sweep = settings(sweep, max_examples=10)  # for tests that are already multiplied by a grid


def number(low: float = -5.0, high: float = 5.0) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_subnormal=False)


@st.composite
def batches(draw: st.DrawFn, *names: str) -> Batch:
    """1 to 5 sequences of 1 to 7 tokens, each token with a float for every name."""
    token = st.fixed_dictionaries({name: number(-20, 0) if "logprob" in name else number() for name in names})
    return [draw(st.lists(token, min_size=n, max_size=n)) for n in draw(LENGTHS)]


def plain(batch: Batch) -> list[dict[str, Any]]:
    """Dicts without `sequence`, all from one prompt: only a state that stops growing tells the sequences
    apart."""
    return [
        {"state": "TL;DR:" + " w" * t, "action": " w", **token}
        for tokens in batch
        for t, token in enumerate(tokens)
    ]


def tagged(batch: Batch) -> list[dict[str, Any]]:
    """Dicts with `sequence` and `position`, whose states alone would run all sequences into one."""
    places = [(s, t) for s, tokens in enumerate(batch) for t in range(len(tokens))]
    return [
        {
            "state": "TL;DR:" + " w" * i,
            "action": " w",
            "action_id": 7 * i,
            "sequence": s,
            "position": t,
            **batch[s][t],
        }
        for i, (s, t) in enumerate(places)
    ]


def ragged(batch: Batch, name: str) -> list[list[float]]:
    return [[token[name] for token in tokens] for tokens in batch]


def flat(sequences: Sequence[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(sequences))


def column(pairs: Sequence[Any], name: str) -> list[float]:
    """One column of a component's output; it must hold Python floats."""
    values = [pairs[i][name] for i in range(len(pairs))]
    assert all(type(value) is float for value in values), f"{name} must be Python floats, got {values}"
    return values


def near(expected: Any) -> Any:
    """Equality in float64."""
    return pytest.approx(expected, rel=1e-9, abs=1e-9)


def padded(sequences: Sequence[Sequence[float]], padding: float = 1e3) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, R) float64 with right padding that must not matter, and its mask."""
    width = max(map(len, sequences)) + 1  # at least one column of padding in every row
    rows = [[*xs, *[padding] * (width - len(xs))] for xs in sequences]
    mask = torch.tensor([[t < len(xs) for t in range(width)] for xs in sequences])
    return torch.tensor(rows, dtype=torch.float64), mask
