"""Generated text cut into tokens.

In: texts. Out: pieces with their ids, in order; their texts add up to the whole.
"""

from __future__ import annotations

import re

from proxima.core.token_text import pieces
from proxima.core.tokenizer import Tokenizer


def split_text(text: str, tokenizer: Tokenizer | None = None) -> list[tuple[str, int | None]]:
    """(text, id) of each token; without a tokenizer a token is a word with the space before it, and has no
    id."""
    if tokenizer is None:
        return [(piece, None) for piece in re.findall(r"\s*\S+|\s+$", text)]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(zip(pieces(ids, tokenizer.decode), ids, strict=True))
