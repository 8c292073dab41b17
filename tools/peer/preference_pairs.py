"""Preferences of people and of a language model, as both trainers read them.

In: a folder with `hh-rlhf/*.jsonl.gz` (whole transcripts) and
`llms-from-scratch-instruct/instruction-data-with-preference.json`. Out: pairs, split by prompt.
"""

import gzip
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proxima.core.tokenizer import Tokenizer
from proxima.data import Preference

FOLDS = 5
ROLES = {"Human": "user", "Assistant": "assistant"}
INSTRUCT = "llms-from-scratch-instruct/instruction-data-with-preference.json"


@dataclass(frozen=True)
class Pair:
    """A preference, where it came from, and the fold in which it is held out."""

    source: str
    fold: int
    prompt: str
    chosen: str
    rejected: str

    @property
    def preference(self) -> Preference:
        return Preference(self.prompt, self.chosen, self.rejected)


def read_pairs(folder: Path, tokenizer: Tokenizer, counts: dict[str, int], max_length: int) -> list[Pair]:
    """This many pairs of each source that fit `max_length` tokens, in an order that does not change."""
    found = []
    for source, turns_and_answers in (("instruct", read_instruct(folder)), ("hh", read_hh(folder))):
        random.Random(source).shuffle(turns_and_answers)
        fitting = (
            (source, render(tokenizer, turns), *answers)
            for turns, *answers in turns_and_answers
            if answers[0] != answers[1] and all(answers)
        )
        rows = (row for row in fitting if fits(tokenizer, row, max_length))
        found += [row for row, _ in zip(rows, range(counts[source]), strict=False)]
    prompts = sorted({prompt for _, prompt, *_ in found})
    random.Random("folds").shuffle(prompts)
    folds = {prompt: i % FOLDS for i, prompt in enumerate(prompts)}
    return [Pair(source, folds[prompt], prompt, *answers) for source, prompt, *answers in found]


def read_instruct(folder: Path) -> list[Any]:
    rows = json.loads((folder / INSTRUCT).read_text(encoding="utf-8"))
    return [
        (
            [{"role": "user", "content": "\n".join(filter(None, (row["instruction"], row["input"])))}],
            row["chosen"],
            row["rejected"],
        )
        for row in rows
    ]


def read_hh(folder: Path) -> list[Any]:
    """Pairs of one-message prompts and longer conversations, where both answers follow the same turns."""
    found = []
    for path in sorted((folder / "hh-rlhf").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                both = [split(json.loads(line)[name]) for name in ("chosen", "rejected")]
                if both[0][0] == both[1][0] and is_dialogue(both[0][0]):
                    found.append((both[0][0], both[0][1], both[1][1]))
    return found


def split(transcript: str) -> tuple[list[dict[str, str]], str]:
    """Turns, and the last answer."""
    before, _, answer = transcript.rpartition("\n\nAssistant:")
    turns = []
    for block in before.split("\n\n"):
        speaker, mark, text = block.partition(":")
        if mark and speaker in ROLES:
            turns.append({"role": ROLES[speaker], "content": text.strip()})
        elif turns:  # a paragraph of the turn before
            turns[-1]["content"] += f"\n\n{block}"
    return turns, answer.strip()


def is_dialogue(turns: list[dict[str, str]]) -> bool:
    """Whether turns alternate, from and to the user: all that chat templates take."""
    return [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2) + ["user"]


def render(tokenizer: Tokenizer, turns: list[dict[str, str]]) -> str:
    """The prompt's text: the tokenizer's chat template, or plain lines where it has none."""
    if getattr(tokenizer, "chat_template", None):
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return text
    return "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns) + "assistant:"


def fits(tokenizer: Tokenizer, row: tuple[str, ...], max_length: int) -> bool:
    longest = max(row[2:], key=len)
    return len(tokenizer(row[1] + longest)["input_ids"]) < max_length - 2


def write_pairs(path: Path, pairs: list[Pair]) -> None:
    path.write_text(json.dumps([asdict(pair) for pair in pairs]), encoding="utf-8")


def load_pairs(path: Path) -> list[Pair]:
    return [Pair(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
