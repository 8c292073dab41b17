# python -m examples.instructions.prompts my-instructions
"""Writes the prompts: one or two constraints and a topic each, as chat messages.

In: a folder. Out: `train.jsonl` and `held_out.jsonl` in it, and for the shortened form `short.jsonl` and
`short_held_out.jsonl` (one constraint each, of the kinds in `SHORT`). Topics and combinations of two kinds
that are held out are never trained on: which they are does not depend on the seed.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import combinations, cycle
from pathlib import Path
from random import Random

from examples.instructions.constraints import CONFLICTS, KINDS, Constraint, mentions

TOPICS = {
    "train": "rain dogs bread bicycles music summer mountains trains gardens schools winter horses rivers "
    "football kitchens forests computers birthdays cameras cars moonlight towns birds tea hospitals airports "
    "cheese islands books shoes markets farms doctors snow hotels guitars spiders sand lamps trees",
    "held_out": "coffee cats ships deserts teachers phones apples storms museums bridges chess volcanoes "
    "robots pianos castles",
}
LEADS = ("Write a short sentence about {}.", "Write something short about {}.")
"""The second, which asks for no sentence, is for the kinds that do."""
SYSTEM = {"role": "system", "content": "Answer briefly."}
"""In place of the model's own system line, which is 14 tokens longer."""
SHORT = ("first_word", "question", "include", "length", "starts_with", "last_word")
"""Kinds that are quickly learned, for two CPU cores."""
HELD_OUT_DISTANCES = (2, 5)
"""Two kinds this far apart on the circle of `KINDS` are never combined in training: this holds out some
combinations of every kind."""


def pairs(split: str) -> list[tuple[str, str]]:
    """The combinations of two kinds that a split has."""
    order = list(KINDS)
    found = []
    for one, other in combinations(range(len(order)), 2):
        distance = min(other - one, len(order) - other + one)
        if (distance in HELD_OUT_DISTANCES) == (split == "held_out"):
            found.append((order[one], order[other]))
    return [pair for pair in found if frozenset(pair) not in CONFLICTS]


def draw(kinds: tuple[str, ...], topic: str, random: Random) -> list[Constraint]:
    """One constraint of each kind, drawn again where they cannot be met together or name the topic."""
    while True:
        found: list[Constraint] = [{"kind": kind, **KINDS[kind].draw(random)} for kind in kinds]
        if can_be_met(found) and not mentions(" ".join(named(found)), topic):
            return found


def named(constraints: list[Constraint]) -> list[str]:
    """Words that an answer must have."""
    asked = [item for item in constraints if item["kind"] != "exclude"]
    texts = [str(item.get("word", "")) + " " + str(item.get("phrase", "")) for item in asked]
    wanted = [word for item in asked for word in item.get("words", [])]
    return [*" ".join(texts).lower().split(), *wanted]


def can_be_met(constraints: list[Constraint]) -> bool:
    refused = {item["word"] for item in constraints if item["kind"] == "exclude"}
    return refused.isdisjoint(named(constraints))


def rows(split: str, count: int, seed: int, short: bool = False) -> Iterator[dict]:
    """Prompts with one constraint and with two, in turn; kinds, combinations and topics equally often."""
    random = Random(f"{split} {seed}")
    orders = [[(kind,) for kind in (SHORT if short else KINDS)], pairs(split), TOPICS[split].split()]
    for order in orders:
        random.shuffle(order)
    singles, doubles, topics = map(cycle, orders)
    for at in range(count):
        topic = next(topics)
        kinds = list(next(doubles if at % 2 and not short else singles))
        random.shuffle(kinds)
        constraints = draw(tuple(kinds), topic, random)
        lead = LEADS["sentences" in kinds or "items" in kinds]
        sentences = [
            lead.format(topic),
            *(KINDS[str(item["kind"])].ask(item) for item in constraints),
        ]
        messages = [SYSTEM, {"role": "user", "content": " ".join(sentences)}]
        yield {"messages": messages, "constraints": constraints, "topic": topic}


def write(folder: str | Path, train: int = 8192, held_out: int = 240, seed: int = 0) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = {
        "train": rows("train", train, seed),
        "short": rows("train", train // 4, seed, short=True),
        "held_out": rows("held_out", held_out, seed),
        "short_held_out": rows("held_out", held_out * 2 // 5, seed, short=True),
    }
    for name, found in files.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in found)
        (Path(folder) / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the prompts of both forms, to train on and held out.")
    parser.add_argument("folder")
    parser.add_argument("--train", type=int, default=8192, help="prompts to train on")
    parser.add_argument("--held-out", type=int, default=240, help="prompts to evaluate on")
    parser.add_argument("--seed", type=int, default=0)
    write(**vars(parser.parse_args()))
