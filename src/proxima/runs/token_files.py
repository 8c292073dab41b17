"""Token records of a logged step, read.

In: a file as the run wrote it, or broken. Out: samples whose columns fit their tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from proxima.core.chat_turns import episode_turns, turns_of
from proxima.core.json_record import Record
from proxima.core.regular_files import read_file

FOLDER, PREFIX = "tokens", "step-"
Otherwise = TypeVar("Otherwise")


def token_steps(run: Path) -> list[int]:
    """Steps that have a file, in order."""
    if (run / FOLDER).is_symlink():
        return []
    names = [path.stem.removeprefix(PREFIX) for path in (run / FOLDER).glob(f"{PREFIX}*.json")]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def read_tokens(run: Path, step: int) -> list[Record]:
    path = run / FOLDER / f"{PREFIX}{step:08d}.json"
    try:
        if (run / FOLDER).is_symlink():
            raise FileNotFoundError
        samples = json.loads(read_file(path, follow=False))["samples"]
        return [_checked(sample) for sample in samples]
    except FileNotFoundError:
        raise ValueError(
            f"{run} has no tokens of step {step}; logged steps are {_some(token_steps(run))}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a file of token records; it is left out") from None


def _checked(sample: Record) -> Record:
    """A sample whose texts are strings and whose columns have one number, or None, per token; columns of
    another length are dropped."""
    tokens = [str(token) for token in sample["tokens"]]
    columns = {
        str(name): [number(value, None) for value in values]
        for name, values in sample["columns"].items()
        if isinstance(values, list) and len(values) == len(tokens)
    }
    rewards, prompt = sample.get("rewards"), str(sample.get("prompt", ""))
    turns, observed = turns_of(prompt, sample.get("turns")), _observed(sample, columns)
    chosen = [place not in observed for place in range(len(tokens))]
    replies = episode_turns(tokens, chosen)
    return {
        **{name: value for name, value in sample.items() if name not in ("turns", "replies")},
        **({"turns": turns} if turns else {}),
        **({"replies": replies} if replies else {}),
        "kind": str(sample.get("kind", "")),
        "prompt": prompt,
        "text": str(sample.get("text", "".join(tokens))),
        "reward": number(sample.get("reward"), None),
        "rewards": {str(name): number(value, None) for name, value in rewards.items()}
        if isinstance(rewards, dict)
        else {},
        "tokens": tokens,
        "observed": [place for place, own in enumerate(chosen) if not own],
        "columns": columns,
    }


def _observed(sample: Record, columns: Mapping[str, Sequence[float | None]]) -> set[int]:
    """Places of the tokens that the policy read and did not choose; in older files, those without a
    log-probability."""
    places = sample.get("observed")
    if isinstance(places, list):
        return {place for place in places if type(place) is int}
    return {place for place, each in enumerate(columns.get("logprob", [])) if each is None}


def number(value: object, otherwise: Otherwise) -> float | Otherwise:
    """A finite float, or `otherwise`."""
    try:
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    return otherwise


def _some(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:8]))
    return f"{shown}, … {steps[-1]}" if len(steps) > 8 else shown or "none"
