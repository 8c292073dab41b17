"""Makes untrusted text (from a model, a file, a run folder) safe to print, or to write as UTF-8.

Terminals act on control characters: an escape sequence can clear the screen, rename the window or hide what
follows. All text from files and models is printed through `visible` (one line) or `printable` (several).
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterator
from typing import TypeAlias

HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories of characters that a terminal would act on or not show."""
KEPT = "\n\t\u200c\u200d"  # in text of several lines; joiners are part of many scripts and of emoji

JsonValue: TypeAlias = object
"""Nested lists and dicts of texts, numbers, booleans and None."""


def visible(text: str, kept: str = "") -> str:
    r"""With escapes (a line break as \n) for all characters that move the cursor or hide text."""
    if not any(unicodedata.category(letter) in HIDDEN for letter in text):
        return text
    return "".join(_shown(letter) if letter not in kept else letter for letter in text)


def printable(text: str) -> str:
    """The same for text of several lines: line breaks and tabs are kept."""
    return visible(text, KEPT)


def _shown(letter: str) -> str:
    return letter.encode("unicode_escape").decode() if unicodedata.category(letter) in HIDDEN else letter


class LineFormatter(logging.Formatter):
    """Formats every message as one line, whatever it contains."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's own name)
        record.message = visible(record.message)
        return super().formatMessage(record)


def stderr_handler() -> logging.Handler:
    """Warnings on stderr, as Python shows them without logging set up, but one line each."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(LineFormatter())
    return handler


def is_encodable(value: JsonValue) -> bool:
    """Whether UTF-8 can encode all texts in a value: JSON can hold half of a surrogate pair, UTF-8 cannot."""
    try:
        for text in _texts(value):
            text.encode()
    except UnicodeEncodeError:
        return False
    return True


def without_lone_surrogates(text: str) -> str:
    """The text with U+FFFD for each unpaired half of a surrogate pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _texts(value: JsonValue) -> Iterator[str]:
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
