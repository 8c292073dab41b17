# python -m examples.instructions.prompts my-instructions
"""Writes the prompts: one or two constraints and a topic each, as chat messages.

In: a folder. Out: `train.jsonl` and `held_out.jsonl` in it. Topics and combinations of two kinds in the
second are never in the first: what is held out does not depend on the seed.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import combinations, cycle
from pathlib import Path
from random import Random

from examples.instructions.constraints import CONFLICTS, KINDS, Constraint

TOPICS = {
    "train": "sea rain dog bread bicycle music summer mountain train garden school winter horse river "
    "football kitchen forest computer birthday camera bus moon city bird tea hospital airport cheese island "
    "library shoe market farm doctor snow hotel guitar spider beach lamp",
    "held_out": "coffee cat ship desert teacher phone apple storm museum bridge chess volcano robot piano "
    "castle",
}
LEADS = ("Write about this topic: {}.", "Tell me something about this topic: {}.", "Topic: {}.")
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
        if can_be_met(found) and topic not in named(found):
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


def rows(split: str, count: int, seed: int) -> Iterator[dict]:
    """Prompts with one constraint and with two, in turn; kinds, combinations and topics equally often."""
    random = Random(f"{split} {seed}")
    orders = [[(kind,) for kind in KINDS], pairs(split), TOPICS[split].split()]
    for order in orders:
        random.shuffle(order)
    singles, doubles, topics = map(cycle, orders)
    for at in range(count):
        topic = next(topics)
        kinds = list(next(doubles if at % 2 else singles))
        random.shuffle(kinds)
        constraints = draw(tuple(kinds), topic, random)
        sentences = [
            random.choice(LEADS).format(topic),
            *(KINDS[str(item["kind"])].ask(item) for item in constraints),
        ]
        message = {"role": "user", "content": " ".join(sentences)}
        yield {"messages": [message], "constraints": constraints, "topic": topic}


def write(folder: str | Path, train: int = 4096, held_out: int = 240, seed: int = 0) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("held_out", held_out)):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows(split, count, seed))
        (Path(folder) / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write train.jsonl and held_out.jsonl.")
    parser.add_argument("folder")
    parser.add_argument("--train", type=int, default=4096, help="prompts to train on")
    parser.add_argument("--held-out", type=int, default=240, help="prompts to evaluate on")
    parser.add_argument("--seed", type=int, default=0)
    write(**vars(parser.parse_args()))
