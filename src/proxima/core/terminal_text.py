"""Text that strangers wrote: a model, a file, a run folder. In: any text. Out: the same, safe to print or to
write as UTF-8.

Terminals act on control characters: an escape sequence can clear the screen, rename the window or hide what
follows. Everything that is printed and came from a file or a model goes through `visible` (one line) or
`printable` (several).
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterator
from typing import Any

HIDDEN = {
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Zl",
    "Zp",
}  # categories of characters that a terminal would act on or swallow
KEPT = "\n\t\u200c\u200d"  # in text of several lines; joiners are part of many scripts and of emoji


def visible(text: str, kept: str = "") -> str:
    r"""Line breaks as \n, and so on: nothing that moves the cursor or hides."""
    if not any(unicodedata.category(letter) in HIDDEN for letter in text):
        return text
    return "".join(_shown(letter) if letter not in kept else letter for letter in text)


def printable(text: str) -> str:
    """Text of several lines; line breaks and tabs stay."""
    return visible(text, KEPT)


def _shown(letter: str) -> str:
    return letter.encode("unicode_escape").decode() if unicodedata.category(letter) in HIDDEN else letter


class LineFormatter(logging.Formatter):
    """A message is one line, whatever is in it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's own name)
        record.message = visible(record.message)
        return super().formatMessage(record)


def stderr_handler() -> logging.Handler:
    """Warnings on stderr, as Python shows them where nobody has set up logging, but one line each."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(LineFormatter())
    return handler


def is_whole(value: Any) -> bool:
    """Whether all texts in a value can be encoded: JSON can hold half of a surrogate pair, which UTF-8
    cannot."""
    try:
        for text in _texts(value):
            text.encode()
    except UnicodeEncodeError:
        return False
    return True


def mended(text: str) -> str:
    """The same with U+FFFD for each half of a surrogate pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested lists and dicts, keys included."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, (list, tuple)):
            pending += item
