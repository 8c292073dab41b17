"""Prose of Markdown files in lines of at most 110 characters: `make format` wraps what is longer.

Only paragraphs and list items with a longer line change. Code, tables, headings and formulas stay, and no
code span, formula or link is broken; one that is longer than a line has a line of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

WIDTH = 110
ROOT = Path(__file__).parents[1]
FENCE = re.compile(r" *(```|\$\$|<!--|\||#|>|<)")
ITEM = re.compile(r"( *)([-*+]|\d+\.|[A-Z]\.) +")
UNBROKEN = re.compile(r"``.*?``|`[^`]*`|\$[^$]*\$|!?\[[^\]]*\]\([^)]*\)")
MARKER = re.compile(r" (?=(?:[-*+>|=]|#+|\d+[.)])(?: |$))")
BLANK = "\0"  # stands for a space that must stay


def wrapped(text: str) -> str:
    """The text, its long paragraphs wrapped."""
    lines: list[str] = []
    for block, is_prose in blocks(text.split("\n")):
        is_long = any(len(line) > WIDTH for line in block)
        lines += rewrap(block) if is_prose and is_long else block
    return "\n".join(lines)


def blocks(lines: list[str]) -> list[tuple[list[str], bool]]:
    """Paragraphs and list items, and what lies between them, which is not prose."""
    found: list[tuple[list[str], bool]] = []
    fence = ""
    for line in lines:
        mark = re.match(r" *(```|\$\$)", line)
        is_prose = not fence and bool(line.strip()) and not FENCE.match(line)
        if mark and fence in ("", mark[1]) and line.count("$$") != 2:
            fence = "" if fence else mark[1]
        if is_prose and found and found[-1][1] and not ITEM.match(line):
            found[-1][0].append(line)
        else:
            found.append(([line], is_prose))
    return found


def rewrap(block: list[str]) -> list[str]:
    """One paragraph or list item."""
    item = ITEM.match(block[0])
    first = item[0] if item else re.match(" *", block[0])[0]  # type: ignore[index]
    rest = re.match(" *", block[1])[0] if len(block) > 1 else " " * len(first)  # type: ignore[index]
    text = " ".join([block[0][len(first) :].strip(), *(line.strip() for line in block[1:])])
    text = UNBROKEN.sub(lambda span: span[0].replace(" ", BLANK), text)
    text = MARKER.sub(BLANK, text)  # at the start of a line it would begin a list
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(BLANK, " ") for line in wrapper.wrap(text)]


def pages() -> list[Path]:
    """The project's Markdown files that are written by hand; a changelog has one line per change."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    return [ROOT / name for name in listed if not name.startswith(("docs/reference/", "CHANGELOG"))]


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or pages():
        path.write_text(wrapped(path.read_text(encoding="utf-8")), encoding="utf-8")
