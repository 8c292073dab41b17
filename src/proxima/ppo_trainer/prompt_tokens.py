"""Prompts to token ids for a rollout: those that are too long are cut (`truncate_prompts`) or refused.

In: texts. Out: token ids that fit the model's context, or an error that names the first bad prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proxima.core.encoding import added_ids, encode_prompts, pad_rows
from proxima.core.json_record import Record
from proxima.core.sampling import sequence_keys
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Prompt, Tokens
from proxima.ppo_trainer.cut_conversations import cut_conversation, is_conversation


def check_prompts(prompts: Sequence[str], first: int = 0) -> list[str]:
    """A non-empty list of non-empty texts, or an error that names the first bad one."""
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list of texts, got one text; put it in a list")
    prompts = list(prompts)
    if not prompts:
        raise ValueError("there are no prompts; give at least one")
    for i, prompt in enumerate(prompts, first):
        if not isinstance(prompt, str):
            raise ValueError(f"prompt {i} is a {type(prompt).__name__}, not a text")
        if not prompt.strip():
            raise ValueError(f"prompt {i} is empty")
    return prompts


def tokenize(
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    context: int | None,
    max_new_tokens: int,
    may_cut: bool,
    first: int = 0,
    limit: str = "max_new_tokens",
    tools: Sequence[Record] = (),
) -> tuple[list[str], list[list[int]], Tensor]:
    """Prompts with their ids, and which were cut to fit (B,). Refuses what would spoil the rollout.

    Args:
        context: most tokens that the model can read; None = any number.
        may_cut: cut prompts that are too long: conversations by whole messages, texts on the left, after BOS.
        first: number of the first prompt, where these are a part of a set; errors count from it.
        limit: the setting that `max_new_tokens` comes from, for errors.
        tools: schemas that chat prompts may name.
    """
    prompts = check_prompts(prompts, first)
    rows, before = encode_prompts(tokenizer, prompts), added_ids(tokenizer).before
    if empty := [i for i, row in enumerate(rows) if not row]:
        raise ValueError(f"prompt {first + empty[0]} has no tokens: {prompts[empty[0]]!r}")
    truncated = torch.zeros(len(rows), dtype=torch.bool)
    if context is None:
        return prompts, rows, truncated
    room = context - max_new_tokens
    if room < len(before) + 1:
        raise ValueError(
            f"{limit} ({max_new_tokens}) leaves no room for a prompt in a context of {context} tokens"
        )
    for i, row in enumerate(rows):
        if len(row) <= room:
            continue
        if not may_cut:
            raise ValueError(
                f"prompt {first + i} has {len(row)} tokens; with {limit} ({max_new_tokens}) the "
                f"context of {context} "
                f"leaves {room}. Shorten it, or set truncate_prompts"
            )
        truncated[i] = True
        whole = is_conversation(prompts[i], tokenizer)
        if whole and (found := cut_conversation(prompts[i], room, tokenizer, tools)):
            prompts[i], rows[i] = found, encode_prompts(tokenizer, [found])[0]
        else:
            prompts[i], rows[i] = _cut_text(prompts[i], row, room, tokenizer, before)
    return prompts, rows, truncated


def _cut_text(
    prompt: str, row: list[int], room: int, tokenizer: Tokenizer, before: list[int]
) -> tuple[Prompt, list[int]]:
    kept = _cut(row[len(before) :], room - len(before), tokenizer.bos_token_id)
    return Prompt(tokenizer.decode(kept), getattr(prompt, "columns", None)), before + kept


def _cut(row: list[int], room: int, bos: int | None) -> list[int]:
    """The last `room` ids of a text; a BOS that begins it (a chat template writes one) stays."""
    return row[:1] + row[1 - room :] if row[0] == bos and room > 1 else row[-room:]


def without_responses(
    prompts: list[str],
    rows: list[list[int]],
    truncated: Tensor,
    tokenizer: Tokenizer,
    seen: dict[bytes, int] | None = None,
) -> Tokens:
    """Prompts as left-padded ids, on the CPU, still without responses; `seen` as `sequence_keys` has it."""
    prompt_ids, prompt_mask = pad_rows(rows, tokenizer.pad_token_id, left=True)
    nothing = torch.zeros(len(rows), 0, dtype=torch.long)
    return Tokens(
        prompts=prompts,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=nothing,
        mask=nothing.bool(),
        ended=torch.zeros(len(rows), dtype=torch.bool),
        truncated=truncated,
        keys=sequence_keys(rows, seen),
        tokenizer=tokenizer,
    )
