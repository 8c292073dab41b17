"""Token ids as text, token by token. In: ids and a tokenizer's decode. Out: the text that each token adds."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import accumulate

LONGEST_CHARACTER = 4  # tokens, where each is a byte


def pieces(ids: Sequence[int], decode: Callable[..., str], ends: Container[int] = ()) -> list[str]:
    """The text that each token adds; together they are the whole text.

    The bytes of an unfinished character wait for the token that ends it. Special tokens such as EOS show
    their own name. Each piece is decoded after the one before it, which some tokenizers need for their
    spaces.

    Args:
        ends: after how many tokens a turn ends, over which no character waits.
    """
    texts: list[str] = []
    before = shown = 0  # ids[before:shown] is the last piece
    for end in range(1, len(ids) + 1):
        known = decode(ids[before:shown], skip_special_tokens=False)
        now = decode(ids[before:end], skip_special_tokens=False)
        waits = end < len(ids) and end - shown < LONGEST_CHARACTER and end not in ends
        if waits and now.endswith("\ufffd"):
            texts.append("")
            continue
        texts.append(now[len(known) :])
        before, shown = shown, end
    return texts


def text_prefixes(ids: Sequence[int], decode: Callable[..., str]) -> list[str]:
    """The text after 0, 1, 2 ... tokens."""
    return list(accumulate(pieces(ids, decode), initial=""))
