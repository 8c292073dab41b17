"""What was generated, cut into tokens.

In: texts. Out: pieces with their ids, in order; their texts add up to the whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Rollout


def split_text(text: str, tokenizer: Tokenizer | None = None) -> list[tuple[str, int | None]]:
    """(text, id) of each token; without a tokenizer a token is a word with the space before it, and has no
    id."""
    if tokenizer is None:
        return [(piece, None) for piece in re.findall(r"\s*\S+|\s+$", text)]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    prefixes = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    prefixes[1:-1] = [
        prefix.rstrip("\ufffd") for prefix in prefixes[1:-1]
    ]  # an unfinished character waits for its end
    return [
        (after[len(before) :], token)
        for before, after, token in zip(prefixes, prefixes[1:], ids, strict=False)
    ]


def check_texts(texts: Sequence[str], rollout: Rollout) -> None:
    """A rollout must be read with its own texts: a mix-up here would train on someone else's words."""
    if len(texts) != len(rollout):
        raise ValueError(f"{len(texts)} texts for a rollout of {len(rollout)} sequences")
    for i, (given, made) in enumerate(zip(texts, rollout.tokens.texts(), strict=True)):
        if given != made:
            raise ValueError(
                f"text {i} is not the rollout's own: got {given[:60]!r}, generated was {made[:60]!r}"
            )
