"""From examples to batches. In: texts. Out: token ids, then padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from proxima.core.encoding import encode_prompts
from proxima.core.tokenizer import Tokenizer
from proxima.models import CHUNK, BaseModel
from proxima.runtime.engine import Layout, head_logprobs, pack, token_logprobs


def encode(
    tokenizer: Tokenizer, prompt: str, completion: str, ended: bool = True
) -> tuple[list[int], list[int]]:
    """Ids of prompt and completion, tokenised as in PPO: the prompt alone, then the completion and EOS."""
    return encode_prompts(tokenizer, [prompt])[0], encode_completion(tokenizer, completion, ended)


def encode_completion(tokenizer: Tokenizer, completion: str, ended: bool) -> list[int]:
    response = tokenizer(completion, add_special_tokens=False)["input_ids"]
    return response + ([tokenizer.eos_token_id] if ended else [])


@dataclass(frozen=True)
class ExampleBatch:
    """Sequences padded as PPO pads them: prompts on the left, responses on the right."""

    ids: Tensor  # (B, T)
    layout: Layout  # where the real tokens are; it reads out the position before each response token
    response_ids: Tensor  # (M,)


def token_losses(role: BaseModel, hidden: Tensor, ids: Tensor, chunk: int | None = None) -> Tensor:
    """-log p (M,) of tokens, from the hidden states (M, D) before them.

    Logits are the largest tensors, so only those of a chunk are in memory; with gradients they are recomputed
    in the backward pass, or not needed there (`head_logprobs`).

    Args:
        chunk: tokens whose logits are in memory at once; by default `CHUNK`.
    """
    size = chunk or CHUNK
    head = role.frozen_head(hidden)

    def losses(states: Tensor, tokens: Tensor) -> Tensor:
        if head is not None:
            return -head_logprobs(states, head, tokens, 1.0)
        return -token_logprobs(role.logits(states), tokens, None, 1.0)

    recompute = head is None and torch.is_grad_enabled() and len(ids) > size
    parts = []
    for start in range(0, max(len(ids), 1), size):
        part = hidden[start : start + size], ids[start : start + size]
        parts.append(checkpoint(losses, *part, use_reentrant=False) if recompute else losses(*part))
    return torch.cat(parts)


def collate(
    rows: Sequence[tuple[list[int], list[int]]], device: torch.device, read_last: bool = False
) -> ExampleBatch:
    """Pad rows of (prompt ids, response ids) to one batch.

    Args:
        read_last: read out the last token of each sequence instead.
    """
    prompts = torch.tensor([len(prompt) for prompt, _ in rows])
    responses = torch.tensor([len(response) for _, response in rows])
    width = int(prompts.max())
    ids = torch.zeros(len(rows), width + int(responses.max()), dtype=torch.long)
    for i, (prompt, response) in enumerate(rows):
        ids[i, width - len(prompt) : width + len(response)] = torch.tensor(prompt + response)
    written = torch.tensor([token for _, response in rows for token in response], device=device)
    return ExampleBatch(ids.to(device), pack(prompts, responses, width, device, read_last), written)
