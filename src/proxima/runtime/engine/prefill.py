"""How prompts are prefilled: which of them in one pass, and how many tokens that pass has.

On a GPU a product may round by its number of rows. So a pass has a size that follows from its prompts' kind,
which is their length rounded up to a power of two, and is filled up with padding: a prompt's keys and values
are the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from proxima.runtime.engine.layout import cut

PREFILL_TOKENS = 8192  # prompt tokens of a pass; a longer prompt has one of its own
PREFILL_TOKENS_ON_CPU = 1024  # where more would not fit its caches
PER_PASS = 16  # prompts of the largest size of their kind in a pass, as far as PREFILL_TOKENS allow
SHORTEST = 32  # tokens of the smallest kind
LONG_STEP = 512  # sizes of a pass for one long prompt


class PrefillPass(NamedTuple):
    rows: list[int]
    """Which of the prompts."""
    tokens: int
    """Of the whole pass, padding included."""
    reads: int
    """Last tokens whose hidden states are computed, padding included."""


def prefill_passes(sizes: Sequence[int], most: int, fixed: bool) -> list[PrefillPass]:
    """Passes that read these prompts.

    Args:
        sizes: tokens of each prompt.
        most: tokens of a pass, but for a longer prompt.
        fixed: a pass has the tokens and reads that follow from its kind, else just those of its prompts.
    """
    if not fixed:
        groups = cut(sizes, most)
        return [PrefillPass(rows, sum(sizes[row] for row in rows), len(rows)) for rows in groups]
    kinds: dict[tuple[int, int], list[int]] = {}
    for row, size in enumerate(sizes):
        kinds.setdefault(_pass_of(size, most), []).append(row)
    return [
        PrefillPass([rows[index] for index in group], tokens, reads)
        for (tokens, reads), rows in kinds.items()
        for group in cut([sizes[row] for row in rows], tokens, reads)
    ]


def _pass_of(size: int, most: int) -> tuple[int, int]:
    """Tokens and reads of the pass that reads a prompt of this many tokens."""
    if size > most:
        return -(-size // LONG_STEP) * LONG_STEP, 1
    kind = max(SHORTEST, 1 << (size - 1).bit_length())
    tokens = min(PER_PASS * kind, most)
    return tokens, max(1, 2 * tokens // kind)  # most prompts of a kind are shorter than its largest
