"""Examples as numbers. In: texts. Out: ids, then padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
