"""Synthetic posts with their facts; which combinations are held out for evaluation.

In: a seed and a split. Out: posts; evaluation posts combine people and events in ways never trained on.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from proxima.world.words import ALWAYS, FILLER, HEARSAY, SENTENCES, SLOTS, SOMETIMES, SUBREDDITS, TITLES

Split = Literal["train", "eval"]
HELD_OUT_SHARE = 8  # one in eight (who, what) combinations is for evaluation only


@dataclass(frozen=True)
class Post:
    """A prompt in the form `SUBREDDIT: … TITLE: … POST: … TL;DR:`, and the 3 to 6 facts that a summary
    should hold."""

    prompt: str
    facts: dict[str, str]  # slot -> value
    sentences: tuple[str, ...]
    others: dict[str, str]  # slot -> a value that the post mentions in passing or not at all, never its own


def held_out(who: str, what: str) -> bool:
    """Whether this combination is for evaluation only."""
    return hashlib.sha256(f"{who}|{what}".encode()).digest()[0] % HELD_OUT_SHARE == 0


def make_post(rng: random.Random, split: Split) -> Post:
    while True:
        facts = {slot: rng.choice(SLOTS[slot]) for slot in ALWAYS}
        if held_out(facts["who"], facts["what"]) == (split == "eval"):
            break
    for slot in SOMETIMES:
        if rng.random() < 0.55:
            facts[slot] = rng.choice(SLOTS[slot])
    others = {
        slot: rng.choice([value for value in values if value != facts.get(slot)])
        for slot, values in SLOTS.items()
    }
    told = [rng.choice(SENTENCES["event"]).format(**facts)]
    told += [rng.choice(SENTENCES[slot]).format(**facts) for slot in SOMETIMES if slot in facts]
    asides = [rng.choice(HEARSAY).format(**others)] if rng.random() < 0.5 else []
    asides += rng.sample(FILLER, rng.randint(1, 2))
    rng.shuffle(asides)
    rest = told[1:] + asides
    rng.shuffle(rest)
    place = rng.randint(0, 2)  # the event comes among the first sentences
    sentences = [*rest[:place], told[0], *rest[place:]]
    question = rng.choice(SENTENCES["ask"]).format(**facts)
    sentences.insert(len(sentences) if rng.random() < 0.8 else rng.randint(0, len(sentences)), question)
    prompt = (
        f"SUBREDDIT: r/{rng.choice(SUBREDDITS)}\nTITLE: {rng.choice(TITLES)}\nPOST: "
        f"{' '.join(sentences)}\nTL;DR:"
    )
    return Post(prompt, facts, tuple(sentences), others)


def make_posts(count: int, split: Split, seed: int = 0) -> list[Post]:
    """Distinct posts; the same seed gives the same posts."""
    return list(stream_posts(count, split, seed))


def stream_posts(count: int, split: Split, seed: int = 0) -> Iterator[Post]:
    rng = random.Random(f"posts {split} {seed}")
    seen: set[str] = set()
    while len(seen) < count:
        post = make_post(rng, split)
        if post.prompt not in seen:
            seen.add(post.prompt)
            yield post


def facts_of(prompt: str) -> Post:
    """Read a post back from its prompt: no two sentences of the world can be confused."""
    body = prompt.split("\nPOST: ")[1].removesuffix("\nTL;DR:")
    facts: dict[str, str] = {}
    for pattern in _PATTERNS:
        for found in pattern.finditer(body):
            facts.update(found.groupdict())
    return Post(prompt, facts, tuple(re.split(r"(?<=[.?]) ", body)), {})


def _pattern(template: str) -> re.Pattern[str]:
    """A sentence template as a pattern that finds its facts; it must begin a sentence."""
    pattern = re.escape(template)
    for slot, values in SLOTS.items():
        pattern = pattern.replace(re.escape(f"{{{slot}}}"), f"(?P<{slot}>{'|'.join(map(re.escape, values))})")
    return re.compile(rf"(?:^|(?<=[.?] )){pattern}(?= |$)")


_PATTERNS = [_pattern(template) for templates in SENTENCES.values() for template in templates]
