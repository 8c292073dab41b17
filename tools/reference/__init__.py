"""The reference pages, generated from the code. In: configs, commands, glossary, docs. Out: Markdown by path
under docs/reference.

`make reference` writes them; a test checks that the committed pages are up to date. They depend neither on
torch nor on time or machine.
"""

from __future__ import annotations

from pathlib import Path

from tools.reference.commands import command_pages
from tools.reference.metrics import metrics_page
from tools.reference.settings import setting_pages
from tools.reference.source import ROOT

OUT = ROOT / "docs" / "reference"
MARK = "<!-- Generated from the code by `make reference` (tools/reference). Change it there, not here. -->"


def pages() -> dict[str, str]:
    """Path -> text."""
    found = {
        **{f"commands/{name}.md": text for name, text in command_pages().items()},
        **{f"settings/{name}.md": text for name, text in setting_pages().items()},
        "metrics.md": metrics_page(),
    }
    return {path: _marked(text) for path, text in found.items()}


def _marked(text: str) -> str:
    """The mark goes below the title: mkdocs takes a page's name from a title that is its first line."""
    title, rest = text.strip().split("\n", 1)
    return f"{title}\n{MARK}\n{rest}\n"


def write(folder: Path = OUT) -> int:
    """Write all pages and remove any others; returns how many there are."""
    wanted = pages()
    for there in folder.rglob("*.md"):
        if there.relative_to(folder).as_posix() not in wanted:
            there.unlink()
    for path, text in wanted.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return len(wanted)
