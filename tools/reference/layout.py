"""The package file by file, for the README: one line each, from the docstring of the file or folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tools.reference.source import ROOT

PACKAGE = ROOT / "src" / "proxima"
BEGIN, END = "<!-- layout: written by `make reference` from the docstrings -->\n", "<!-- end of layout -->\n"
WIDTH, MOST = 34, 170  # of a name's column; characters of a line's text


def layout(package: Path = PACKAGE) -> str:
    """The tree as a block of text: folders in order of name, files before folders."""
    return "\n".join(["```text", *_lines(package, 0), "```", ""])


def with_layout(readme: str) -> str:
    """The README with today's tree between its marks."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + layout() + END + rest.split(END)[1]


def _lines(folder: Path, depth: int) -> list[str]:
    files = [path for path in sorted(folder.glob("*.py")) if path.name not in ("__init__.py", "__main__.py")]
    folders = [path for path in sorted(folder.iterdir()) if (path / "__init__.py").is_file()]
    named = "src/proxima/" if folder == PACKAGE else f"{'  ' * depth}{folder.name}/"
    lines = [_line(named, folder / "__init__.py")]
    lines += [_line("  " * (depth + 1) + path.name, path) for path in files]
    return lines + [line for path in folders for line in _lines(path, depth + 1)]


def _line(name: str, path: Path) -> str:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return f"{name:<{WIDTH}}{shortened(said)}".rstrip()


def shortened(docstring: str) -> str:
    """The sentences of its first paragraph that fit, at least one; "In" only together with "Out"."""
    paragraph = " ".join(docstring.split("\n\n", maxsplit=1)[0].split())
    sentences = re.split(r"(?<!et al)(?<=[.?!]) (?=[A-Z`\"(])", paragraph)
    kept = sentences[0]
    for sentence in sentences[1:]:
        if len(kept) + len(sentence) >= MOST:
            break
        kept += f" {sentence}"
    return re.sub(r" In: (?!.* Out: ).*", "", kept).removesuffix(".")
