"""Code blocks of a page. In: Markdown. Out: `Block`s in order; a ValueError with page, line and remedy where
one breaks the
convention: a block is run, parsed, written to a file (`title=`), shown (`text`), or carries the reason why
    it is not run."""

from __future__ import annotations

import csv
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

RUN = ("bash", "python")
PARSED: dict[str, Callable[[str], Any]] = {
    "yaml": yaml.safe_load,
    "json": json.loads,
    "jsonl": lambda text: [json.loads(line) for line in text.splitlines() if line.strip()],
    "toml": tomllib.loads,
    "csv": lambda text: list(csv.reader(text.splitlines(), strict=True)),
}
SHOWN = ("text", "diff", "html", "css", "make", "docker")
HINT = (
    "write ```bash or ```python for what is run, ```text for output and drawings; "
    + f"known are {', '.join([*RUN, *PARSED, *SHOWN])}"
)

FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)$")
TITLE = re.compile(r"""title=(?:"([^"]*)"|'([^']*)')""")
MARK = re.compile(r"^<!--\s*(?P<mark>not run|server)\s*(?::\s*(?P<why>.*?)\s*)?-->$")
LIKE_A_MARK = re.compile(r"^<!--\s*(not|server|skip|no.?run)", re.IGNORECASE)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Of the opening fence; the first line of `text` is the next one."""
    language: str
    text: str
    title: str = ""
    not_run: str = ""
    """Why not; empty where it is run."""
    server: bool = False

    @property
    def place(self) -> str:
        return f"{self.page.name}, line {self.line}"


def read_blocks(page: Path) -> list[Block]:
    return [_checked(block) for block in _fences(page)]


def _fences(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if not opening:
            if re.match(r"^\s*>[>\s]*(```|~~~)", lines[at]):
                raise ValueError(
                    f"{page.name}, line {at + 1}: a fence inside a quote is not read; take it out of the "
                    "quote"
                )
            at += 1
            continue
        end = _closing(lines, at, opening["fence"])
        if end is None:
            raise ValueError(f"{page.name}, line {at + 1}: this fence is never closed")
        indent = len(opening["indent"])
        body = [line[min(indent, len(line) - len(line.lstrip())) :] for line in lines[at + 1 : end]]
        language, _, rest = opening["info"].strip().partition(" ")
        title = TITLE.search(rest)
        mark, why = _mark(page, lines, at)
        yield Block(
            page,
            at + 1,
            language,
            "".join(f"{line}\n" for line in body),
            (title[1] or title[2]) if title else "",
            why,
            mark == "server",
        )
        at = end + 1


def _closing(lines: list[str], at: int, fence: str) -> int | None:
    for number in range(at + 1, len(lines)):
        line = lines[number].strip()
        if len(line) >= len(fence) and set(line) == {fence[0]}:
            return number
    return None


def _mark(page: Path, lines: list[str], at: int) -> tuple[str, str]:
    """The mark right above a fence and its reason."""
    above = lines[at - 1].strip() if at else ""
    found = MARK.match(above)
    where = f"{page.name}, line {at}"
    if not found:
        if LIKE_A_MARK.match(above):
            raise ValueError(
                f"{where}: {above} is not a mark; the marks are <!-- not run: WHY --> and <!-- server -->"
            )
        if not above and at > 1 and MARK.match(lines[at - 2].strip()):
            raise ValueError(f"{where}: take out the empty line between the mark and its block")
        return "", ""
    why = found["why"] or ""
    if found["mark"] == "not run" and not why:
        raise ValueError(f"{where}: say why the block is not run: <!-- not run: WHY -->")
    return found["mark"], why


def _checked(block: Block) -> Block:
    def wrong(what: str) -> ValueError:
        return ValueError(f"{block.place}: {what}")

    if block.language not in (*RUN, *PARSED, *SHOWN):
        raise wrong(
            f"a block of {block.language!r}; {HINT}"
            if block.language
            else f"a block without a language; {HINT}"
        )
    if block.title:
        path = PurePosixPath(block.title)
        if path.is_absolute() or ".." in path.parts:
            raise wrong(
                f"the title {block.title!r} is the name of a file to write; it must stay in the page's folder"
            )
    if block.server and (block.language != "bash" or block.title):
        raise wrong("only a bash block without a title can be a server")
    if block.not_run and (block.title or block.language in SHOWN):
        raise wrong("this block is not run anyway; take out its mark")
    if block.language == "python":
        try:
            compile(block.text, block.title or block.page.name, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise wrong(f"not Python: {error}") from None
    if block.language in PARSED and not block.not_run:
        try:
            PARSED[block.language](block.text)
        except (ValueError, yaml.YAMLError, csv.Error) as error:
            raise wrong(f"not {block.language}: {error}; shortened output is ```text") from None
    return block


def proxima_commands(script: str) -> Iterator[list[str]]:
    """The arguments of every `proxima` in a script, whatever stands before it (`torchrun ...

    -m`, variables).
    """
    for line in re.sub(r"\\\n", " ", script).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        command: list[str] | None = None
        before = ""
        for word in lexer:
            if set(word) <= set("|&;<>"):
                if command is not None:
                    yield command
                command = None
            elif command is not None:
                command.append(word)
            elif word == "proxima" and (not before or before in ("-m", "!") or "=" in before):
                command = []
            before = "" if set(word) <= set("|&;<>") else word
        if command is not None:
            yield command
