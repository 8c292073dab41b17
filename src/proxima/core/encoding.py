"""Prompts as ids.

In: texts and a tokenizer. Out: ids that an answer can follow, and what the tokenizer put before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxima.core.tokenizer import Tokenizer

PROBE = "a"  # any text: what is added does not depend on it


class Added(NamedTuple):
    """Ids that a tokenizer puts around every text: BOS before it, for example, or EOS after it."""

    before: list[int]
    after: list[int]


def added_ids(tokenizer: Tokenizer) -> Added:
    """What this tokenizer adds to a text by itself."""
    bare, whole = (tokenizer(PROBE, add_special_tokens=added)["input_ids"] for added in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if bare and whole[start : start + len(bare)] == bare:
            return Added(whole[:start], whole[start + len(bare) :])
    return Added([], [])


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Ids of each prompt with what the tokenizer puts before it, and without what it puts after it.

    An EOS there would stand between prompt and answer: after EOS a model begins another text.
    """
    rows: list[list[int]] = tokenizer(list(prompts), verbose=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    if not any(
        row and row[-1] in special for row in rows
    ):  # no need to ask what is added, which takes a while
        return rows
    after = added_ids(tokenizer).after
    return [row[: -len(after)] if after and row[-len(after) :] == after else row for row in rows]


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids (B, P) padded on the left, and their mask."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows])
    return ids, torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
