"""Texts to ids: prompts that a response can follow (with the tokenizer's BOS, without its EOS), rows
of ids as one padded tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxima.core.tokenizer import Tokenizer

PROBE = "a"  # any text: the added ids do not depend on it


class Added(NamedTuple):
    """Ids that a tokenizer adds to every text, such as BOS before it or EOS after it."""

    before: list[int]
    after: list[int]


def added_ids(tokenizer: Tokenizer) -> Added:
    """The ids that this tokenizer adds to every text."""
    bare = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    whole = tokenizer(PROBE, add_special_tokens=True)["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if bare and whole[start : start + len(bare)] == bare:
            return Added(whole[:start], whole[start + len(bare) :])
    return Added([], [])


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """The ids of each prompt, with what the tokenizer adds before it and without what it adds after it.

    An EOS would come between prompt and response, and after EOS a model starts another text.
    """
    rows: list[list[int]] = tokenizer(list(prompts), verbose=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    if not any(row and row[-1] in special for row in rows):  # skips `added_ids`, which takes a while
        return rows
    after = added_ids(tokenizer).after
    return [row[: -len(after)] if after and row[-len(after) :] == after else row for row in rows]


def pad_rows(rows: Sequence[Sequence[int]], pad_id: int = 0, left: bool = False) -> tuple[Tensor, Tensor]:
    """Ids (B, T) padded on the right, or on the left, and their mask."""
    width = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(len(row))
        ids[i, place] = torch.tensor(row, dtype=torch.long)
        mask[i, place] = True
    return ids, mask
