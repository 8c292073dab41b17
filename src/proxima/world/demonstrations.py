"""Demonstrations of mixed quality, like those that people write.

In: a post. Out: a summary in one of six styles.
"""

from __future__ import annotations

import random

from proxima.world.posts import Post
from proxima.world.words import FILLER, OPENING, SOMETIMES

STYLES = {
    "faithful": 0.32,
    "partial": 0.20,
    "first_line": 0.16,
    "rambling": 0.16,
    "wrong": 0.03,
    "unfinished": 0.13,
}
"""How often each style occurs."""

OPENING_SHARE = 0.15


def tell(facts: dict[str, str], rng: random.Random) -> str:
    """The given facts, and no others, as one summary in one of a few wordings."""
    event = (
        " ".join(f"my {facts['who']} {facts['what']}".split())
        if "what" in facts
        else f"it is about my {facts['who']}"
    )
    place = "".join(f" {facts[slot]}" for slot in ("when", "where") if slot in facts)
    feeling = f"i feel {facts['feeling']}" if "feeling" in facts else ""
    ask = f"{facts['ask']}?" if "ask" in facts else ""
    clauses = [f"{event}{place}", *([feeling] if feeling else [])]
    if ask and rng.random() < 0.25:
        return f"{ask} {', '.join(clauses)}."
    return f"{', '.join([*clauses, ask])}" if ask else f"{', '.join(clauses)}."


def write_summary(post: Post, rng: random.Random, style: str | None = None) -> str:
    """A summary, with the space that follows `TL;DR:`."""
    style = style or rng.choices(list(STYLES), list(STYLES.values()))[0]
    facts = dict(post.facts)
    if style == "faithful":
        text = tell(facts, rng)
    elif style == "partial":
        droppable = [slot for slot in (*SOMETIMES, "ask", "what") if slot in facts]
        for slot in rng.sample(droppable, min(len(droppable), rng.randint(1, 3))):
            del facts[slot]
        text = tell(facts, rng)
    elif style == "first_line":
        text = post.sentences[0]
    elif style == "rambling":
        text = f"{tell(facts, rng)} {' '.join(rng.sample(FILLER, rng.randint(3, 5)))}"
    elif style == "wrong":
        changed = rng.sample(sorted(facts), rng.randint(1, 2))
        text = tell({**facts, **{slot: post.others[slot] for slot in changed}}, rng)
    else:
        words = tell(facts, rng).split()
        text = " ".join(words[: rng.randint(3, max(4, len(words) - 3))])
    if rng.random() < OPENING_SHARE:
        text = f"{OPENING} {text}"
    return f" {text}"
