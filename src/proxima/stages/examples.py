"""Demonstrations and preferences. In: JSONL files, plain or gzipped. Out: records, then ids and padded batches."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Demonstration:
    """How a prompt should be answered: fields `prompt` and `completion`."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Preference:
    """Which of two answers is better: fields `prompt`, `chosen`, `rejected`; `*_ended` false for an answer that was cut off."""

    prompt: str
    chosen: str
    rejected: str
    chosen_ended: bool = True
    rejected_ended: bool = True


def read_demonstrations(path: str | Path) -> list[Demonstration]:
    return [Demonstration(*_texts(row, ("prompt", "completion"), path, i)) for i, row in enumerate(read_jsonl(path), 1)]


PREFERENCE = ("prompt", "chosen", "rejected")


def read_preferences(path: str | Path) -> list[Preference]:
    return [
        Preference(
            **dict(zip(PREFERENCE, _texts(row, PREFERENCE, path, i), strict=True)),
            chosen_ended=bool(row.get("chosen_ended", True)),
            rejected_ended=bool(row.get("rejected_ended", True)),
        )
        for i, row in enumerate(read_jsonl(path), 1)
    ]


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """One JSON object a line."""
    try:
        opened = gzip.open if str(path).endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            rows = [json.loads(line) for line in file if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path} as lines of JSON: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no examples")
    return rows


def _texts(row: Any, fields: tuple[str, ...], path: str | Path, number: int) -> list[str]:
    for field in fields:
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise ValueError(f"{path}, example {number}: `{field}` is missing or not a text")
        if field == "prompt" and not row[field].strip():
            raise ValueError(f"{path}, example {number}: the prompt is empty")
    return [row[field] for field in fields]


def encode(tokenizer: Any, prompt: str, completion: str, ended: bool = True) -> tuple[list[int], list[int]]:
    """Ids of prompt and completion, cut where PPO cuts them: the prompt by itself, then what follows, then EOS."""
    response = tokenizer(completion, add_special_tokens=False)["input_ids"]
    return tokenizer(prompt)["input_ids"], response + ([tokenizer.eos_token_id] if ended else [])


@dataclass(frozen=True)
class Batch:
    """Sequences padded as PPO pads them: prompts on the left, responses on the right."""

    ids: Tensor  # (B, T)
    mask: Tensor  # (B, T)
    prompt_width: int

    @property
    def response_ids(self) -> Tensor:
        return self.ids[:, self.prompt_width :]

    @property
    def response_mask(self) -> Tensor:
        return self.mask[:, self.prompt_width :]


def collate(rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> Batch:
    prompts = max(len(prompt) for prompt, _ in rows)
    responses = max(len(response) for _, response in rows)
    ids = torch.zeros(len(rows), prompts + responses, dtype=torch.long)
    mask = torch.zeros(len(rows), prompts + responses, dtype=torch.bool)
    for i, (prompt, response) in enumerate(rows):
        span = slice(prompts - len(prompt), prompts + len(response))
        ids[i, span] = torch.tensor(prompt + response)
        mask[i, span] = True
    return Batch(ids.to(device), mask.to(device), prompts)
