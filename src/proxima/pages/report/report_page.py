"""The page that all reports share.

In: sections of escaped markup, charts and token records. Out: one self-contained HTML file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape as escape_markup
from pathlib import Path

from proxima.core.chat_turns import ENVIRONMENT, Turn, cut_text, cut_turns
from proxima.core.json_record import Record
from proxima.pages.report.findings import RunFinding
from proxima.pages.report.report_samples import Pair
from proxima.pages.report.run_facts import Card
from proxima.pages.report.short_numbers import short
from proxima.pages.web import LOOK, PARTS, make_page, read_script, read_style

STATIC = Path(__file__).parent / "static"


CONTROLS = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}


def escape(text: str) -> str:
    """Text as markup; control characters as their pictures."""
    return escape_markup(text.translate(CONTROLS))


class Page:
    """A report being built: sections are added in order, charts and tokens go into the page's data."""

    def __init__(self, title: str, kind: str):
        self.title, self.kind = title, kind
        self.sections: list[tuple[str, str]] = []
        self.charts: list[Record] = []
        self.tokens: list[Record] = []
        self.column = ""

    def section(self, title: str, *parts: str) -> None:
        """A section with a heading; its parts are markup."""
        self.sections.append((title, "\n".join(parts)))

    def plots(self, charts: Sequence[Record]) -> str:
        """A grid of charts."""
        first = len(self.charts)
        self.charts += charts
        places = "".join(
            f'<div class="plot card" data-chart="{first + i}"></div>' for i in range(len(charts))
        )
        return f'<div class="plots">{places}</div>'

    def microscope(self, steps: Sequence[Record], column: str = "advantage") -> str:
        """The token microscope over steps of samples, at first coloured by `column`; one per page."""
        self.tokens, self.column = list(steps), column
        return '<div id="microscope" class="card"></div>'

    def write(self, path: Path) -> Path:
        titles = [title for title, _ in self.sections]
        links = "".join(
            f'<a href="#s{number}">{escape(title)}</a>' for number, title in enumerate(titles) if title
        )
        parts = [
            f'<section id="s{number}">{f"<h2>{escape(title)}</h2>" if title else ""}\n{markup}\n</section>'
            for number, (title, markup) in enumerate(self.sections)
        ]
        body = "\n".join([*parts[:1], f'<nav aria-label="Sections of this page">{links}</nav>', *parts[1:]])
        text = make_page(
            f"{self.title} · Proxima",
            '<header class="bar"><span class="brand">Proxima '
            f"<span>{escape(self.kind)}</span></span></header>\n"
            f'<main class="report">\n{body}\n'
            "<noscript><p>Charts and the token microscope need JavaScript; nothing is loaded from "
            "elsewhere.</p></noscript>\n"
            "</main>",
            read_script(*PARTS, STATIC / "report.js"),
            read_style(*LOOK, STATIC / "report.css"),
            {"charts": self.charts, "tokens": self.tokens, "column": self.column},
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"cannot write the report {path}: {error.strerror or error}; choose another place"
            ) from error
        return path


def paragraph(text: str, kind: str = "") -> str:
    """Plain text; `this` is set as code."""
    words = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return f'<p class="{escape(kind)}">{words}</p>' if kind else f"<p>{words}</p>"


def listed(texts: Sequence[str]) -> str:
    """A numbered list."""
    return f"<ol>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ol>"


def conclusion(text: str, better: bool | None) -> str:
    """The conclusion in a word, then in a sentence."""
    kind, word = {True: ("yes", "better"), False: ("no", "worse"), None: ("open", "not clear")}[better]
    return f'<p class="conclusion"><span class="{kind}">{word}</span> {escape(text)}</p>'


def findings(found: Sequence[RunFinding]) -> str:
    """Questions, each with its answer in a word, a sentence, and the numbers behind it."""
    return f'<div class="findings">{"".join(map(_finding, found))}</div>'


def _finding(found: RunFinding) -> str:
    kind = {"good": "yes", "bad": "no", "open": "open"}[found.status]
    between = any(math.isfinite(each.middle) for each in found.evidence)
    rows = [
        (
            f"{each.title}\n{each.sign}".strip(),
            *map(short, (each.start, each.middle, each.end) if between else (each.start, each.end)),
        )
        for each in found.evidence
    ]
    head = ("", "start", *([f"step {found.step}"] if between else []), "end")
    shown = table(head, rows) if rows else ""
    answer = f'<span class="{kind}">{escape(found.answer)}</span>'
    title = f"<h3>{escape(found.question)} {answer}</h3>"
    return f'<article class="card"><div>{title}{paragraph(found.sentence)}</div>{shown}</article>'


def heading(text: str) -> str:
    """The page's name; direction marks in it reach no further."""
    return f"<h1><bdi>{escape(text)}</bdi></h1>"


def numbers(cards: Sequence[Card]) -> str:
    """Headline numbers in a row."""
    made = "".join(
        f'<div class="card"><dt>{escape(card.label)}</dt>'
        f"<dd><b>{escape(card.value)}</b> <span>{escape(card.note)}</span></dd></div>"
        for card in cards
    )
    return f'<dl class="numbers">{made}</dl>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: int = 1) -> str:
    """Rows of texts; all columns but the first `right` hold numbers."""
    kinds = ["" if place < right else ' class="n"' for place in range(len(head))]
    top = "".join(
        f'<th scope="col"{kind}>{escape(text)}</th>' for kind, text in zip(kinds, head, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(text)}</td>' for kind, text in zip(kinds, row, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(title: str, markup: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{markup}</details>"


def code(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>"


def pairs(rows: Sequence[Pair], score: str = "reward") -> str:
    """Prompts with the answer before and after."""
    return f'<div class="pairs">{"".join(_pair(row, score) for row in rows)}</div>'


def _pair(row: Pair, score: str) -> str:
    def answer(text: str, said: Sequence[Turn]) -> str:
        if row.turns or said:
            return turns(said or [{"role": "assistant", "text": text}])
        return f'<p class="told" dir="auto">{escape(cut_text(text))}</p>'

    sides = "".join(
        f'<div class="{side}"><h3>{side} {_score(value, score)}</h3>{answer(text, said)}</div>'
        for side, text, said, value in (
            ("before", row.before, row.before_turns, row.before_score),
            ("after", row.after, row.after_turns, row.after_score),
        )
    )
    prompt = f'<p class="prompt told" dir="auto">{escape(cut_text(row.prompt))}</p>'
    if row.turns:
        prompt = f'<div class="prompt">{turns(row.turns)}</div>'
    return f'<article class="pair card">{prompt}<div class="sides">{sides}</div></article>'


def turns(conversation: Sequence[Turn]) -> str:
    """A conversation as markup, as `showPrompt` of turns.js makes it in the browser; system prompts are
    folded."""
    return f'<div class="turns">{"".join(map(_turn, cut_turns(conversation)))}</div>'


def _turn(turn: Turn) -> str:
    role, text = escape(turn["role"]), f'<p class="told" dir="auto">{escape(turn["text"])}</p>'
    if turn["role"] == "system":
        return f'<details class="turn"><summary>{role}</summary>{text}</details>'
    mark = " read" if turn["role"] == ENVIRONMENT else ""
    return f'<div class="turn{mark}"><b>{role}</b>{text}</div>'


def _score(value: float | None, name: str) -> str:
    return "" if value is None or not math.isfinite(value) else f"<span>{escape(name)} {value:.3g}</span>"


def settings(values: Mapping[str, object]) -> str:
    return table(("setting", "value"), [(name, str(value)) for name, value in values.items()], right=2)
