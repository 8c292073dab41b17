"""Every message that docs/troubleshooting.md quotes is in the source: a message that is reworded must be
reworded there too.

A quote is a Markdown block quote; `…` stands for what the program fills in. In the source that is a field of
an f-string or a `%` of a log message, so both sides are compared with `…` in these places.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
FIELD = r"%[-+ #0-9.]*[sdgfr]"


def quotes(text: str) -> list[str]:
    found = re.findall(r"(?:^> .*\n)+", text, re.MULTILINE)
    return [" ".join(line.removeprefix("> ") for line in quote.splitlines()) for quote in found]


def texts_of(source: str) -> list[str]:
    """Every text in some Python, neighbours joined as Python joins them, fields as `…`."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            texts.append(
                "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(re.sub(FIELD, "…", node.value))
    return texts


@cache
def messages() -> list[str]:
    files = sorted((ROOT / "src" / "proxima").rglob("*.py"))
    return [text for file in files for text in texts_of(file.read_text(encoding="utf-8"))]


def is_said(quote: str) -> bool:
    return any(quote in message for message in messages())


def test_the_page_quotes_many_messages():
    assert len(set(quotes(PAGE))) > 40


@pytest.mark.parametrize("quote", quotes(PAGE))
def test_a_quoted_message_is_in_the_source(quote):
    assert len(quote.replace("…", "").split()) >= 2, "too short to be told from others"
    assert is_said(quote), f"no message of the package reads: {quote}"


def test_a_reworded_message_is_found_out():
    assert is_said("rolled back to step …; learning rates are now x …")
    assert not is_said("rolled back to step …; the learning rates are now x …")
    assert not is_said("rolled back to step 3; learning rates are now x 0.5")


def test_fields_and_neighbours_are_read_as_python_reads_them():
    source = 'f"{many} of {count:,}, " "then" f" {limit:.3g} s"\nlog.warning("at %d: %s", 1, 2)'
    assert "… of …, then … s" in texts_of(source)
    assert "at …: …" in texts_of(source)


def test_settings_are_turned_by_flags_that_exist():
    """`name value` in backticks, where the name is a setting, can be given on the command line as it
    stands."""
    from proxima.config import PPOConfig

    fields, given = set(PPOConfig().to_dict()), re.findall(r"`([a-z_]+) ([\w.-]+)`", PAGE)
    turned = [(name, value) for name, value in given if name in fields]
    assert len(turned) > 10
    for name, value in turned:
        number = re.fullmatch(r"[\d.e-]+", value)
        PPOConfig.from_dict(
            {name: (float(value) if "." in value or "e" in value else int(value)) if number else value}
        )
