"""Prose has lines of at most 110 characters, and wrapping it changes nothing but its line breaks."""

import pytest

from tools.wrap_prose import WIDTH, pages, wrapped

WORDS = "word " * 30


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.stem)
def test_prose_is_wrapped(page):
    text = page.read_text(encoding="utf-8")
    assert wrapped(text) == text, "run `make format`"


def test_paragraphs_and_list_items_are_wrapped_with_their_indent():
    lines = wrapped(f"{WORDS}\n\n1. {WORDS}\n- {WORDS}\n  {WORDS}").split("\n")
    assert max(map(len, lines)) <= WIDTH
    assert [line[:4] for line in lines] == ["word"] * 2 + [""] + ["1. w", "   w", "- wo", "  wo", "  wo"]


@pytest.mark.parametrize(
    "text",
    [
        f"```text\n{WORDS}\n\n{WORDS}\n```",
        f"| {WORDS}|",
        f"## {WORDS}",
        f"$$\n{WORDS}\n$$",
        f"<!-- {WORDS}-->",
        f"> {WORDS}",
        f"`{WORDS}`",
        f"[{WORDS}](page.md)",
        f"- ${WORDS}$",
        f"short\n{WORDS[:WIDTH].strip()}",
    ],
)
def test_what_must_not_be_broken_stays(text):
    assert wrapped(text) == text


def test_no_line_begins_a_list_that_was_none():
    assert "\n- " not in wrapped("- " + "word - " * 40)


def test_only_long_paragraphs_change():
    assert wrapped(f"one\ntwo\n\n{WORDS}").startswith("one\ntwo\n\nword")
