"""`proxima reward --continue`: which settings must be those of the earlier reward model, and which data it
saw. In: its folder. Out: what it was trained on, and whether these settings can go on from it.

A folder's `data.json` names the examples; those of the model that it went on from are among them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, overload

from proxima.config import RewardConfig, read_yaml, settings_in
from proxima.core.regular_files import read_file
from proxima.core.tokenizer import Tokenizer
from proxima.data import Rows, open_rows
from proxima.runs import write_json

if TYPE_CHECKING:
    from proxima.finetuning import RatingTrainer, RewardTrainer

Example = TypeVar("Example")
Trainer = TypeVar("Trainer", "RatingTrainer", "RewardTrainer")
DATA_FILE = "data.json"
NONE = "none"
SAME = (
    "model_name",
    "lora_r",
    "lora_alpha",
    "lora_targets",
    "ensemble",
    "quantize",
)  # what the weights' shape and meaning rest on


@dataclass(frozen=True)
class ExampleSource:
    """Examples that were trained on: a file, and how many of its rows (0 = all)."""

    data: str
    limit: int = 0


class Joined(Sequence[Example]):
    """Several sequences of examples as one; an example is read when it is asked for."""

    def __init__(self, parts: Sequence[Sequence[Example]]):
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @overload
    def __getitem__(self, place: int) -> Example: ...
    @overload
    def __getitem__(self, place: slice) -> list[Example]: ...
    def __getitem__(self, place: int | slice) -> Example | list[Example]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        left = place + len(self) if place < 0 else place
        for part in self.parts:
            if 0 <= left < len(part):
                return part[left]
            left -= len(part)
        raise IndexError(place)


def with_earlier(
    read: Callable[[Rows, Tokenizer], Sequence[Example]],
    rows: Rows,
    sources: Sequence[ExampleSource],
    tokenizer: Tokenizer,
) -> Sequence[Example]:
    """New examples, and the earlier ones after them; each source may have columns of its own."""
    new = read(rows, tokenizer)
    return (
        Joined([new, *(read(open_rows(each.data, each.limit), tokenizer) for each in sources)])
        if sources
        else new
    )


def continued(trainer: Trainer, folder: str, examples: Sequence[object]) -> Trainer:
    """The trainer with the weights of the model in a folder, if there is one.

    Args:
        examples: as `with_earlier` gives them.
    """
    if folder:
        trainer.continued = folder
        trainer.new_examples = len(examples.parts[0] if isinstance(examples, Joined) else examples)
        trainer.held_out_before = held_out_keys(folder)
    return trainer


def held_out_keys(folder: str) -> set[int]:
    """Of the prompts that were held out when the model in a folder was trained; none where it does not
    say."""
    try:
        return {int(key, 16) for key in json.loads(read_file(Path(folder) / DATA_FILE))["held_out"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def earlier_sources(folder: str, given: str, config: RewardConfig) -> list[ExampleSource]:
    """What a reward model was trained on, newest first.

    Args:
        folder: of the model; empty = none is trained further.
        given: `--earlier`: a file, `none`, or empty = what the folder names.
        config: the settings, which must be able to go on from it.
    """
    if not folder:
        if given:
            raise ValueError(
                f"--earlier ({given}) is mixed in where a model is trained further; add --continue"
            )
        return []
    check_continued(folder, config)
    if given:
        return [] if given == NONE else [ExampleSource(given)]
    try:
        noted = json.loads(read_file(Path(folder) / DATA_FILE))
        return [ExampleSource(str(each["data"]), int(each["limit"])) for each in noted["sources"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{folder} does not say what it was trained on (no {DATA_FILE}); give the earlier examples with "
            f"--earlier FILE, or --earlier {NONE} to train on the new ones alone"
        ) from None


def check_continued(folder: str, config: RewardConfig) -> None:
    """Refuse a folder that is not a reward model, or one whose weights other settings made."""
    path = settings_in(Path(folder))
    if path is None or not (Path(folder) / "reward.json").is_file():
        raise ValueError(f"--continue {folder}: not a folder that `proxima reward` wrote")
    before = read_yaml(str(path))
    if bool(start := before.get("sft_adapter")) != bool(config.sft_adapter):
        raise ValueError(
            f"--continue {folder}: it was trained from the SFT adapter {start}; add --sft-adapter {start}"
            if start
            else f"--continue {folder}: it was trained without an SFT adapter; leave out --sft-adapter"
        )
    for name in SAME:
        now = getattr(config, name)
        before.setdefault(name, getattr(RewardConfig, name))  # settings of an earlier version
        if before[name] != now:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--continue {folder}: it was trained with {name} {before[name]}, not {now}; add --{flag} "
                f"{before[name]}"
            )


def note_sources(folder: Path, sources: Sequence[ExampleSource], held_out: Iterable[int]) -> None:
    """For the next round.

    Args:
        held_out: keys of the prompts that were not trained on.
    """
    noted = {
        "sources": [asdict(source) for source in sources],
        "held_out": [f"{key:016x}" for key in sorted(held_out)],
    }
    write_json(folder / DATA_FILE, noted)
