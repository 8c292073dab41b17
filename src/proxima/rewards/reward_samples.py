"""`Samples`: what a reward may read of a batch: texts, token ids, whether responses are finished, columns.

They are made from the tokens of a rollout or from plain texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

import torch

from proxima.core.chat_turns import ASSISTANT, ENVIRONMENT, Turn
from proxima.core.encoding import encode_prompts, pad_rows
from proxima.core.sampling import sequence_keys
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Tokens

Columns: TypeAlias = dict[str, object]
"""The values of a prompt's data columns, of any JSON type."""


@dataclass(frozen=True)
class Samples:
    """A batch as rewards see it."""

    prompts: list[str]  # may be `proxima.core.types.Prompt`, with columns
    completions: list[str]
    completion_ids: list[list[int]]  # response tokens, EOS included
    ended: list[bool]  # whether the last token is an EOS
    tokens: Tokens | None = None  # None = made from texts
    said: list[list[Turn]] = field(default_factory=list)  # of episodes, where `tokens` does not hold them

    @classmethod
    def of_tokens(cls, tokens: Tokens) -> Samples:
        rows = [list(row) for row in tokens.response_rows]
        return cls(list(tokens.prompts), tokens.texts(), rows, tokens.ended.tolist(), tokens)

    @classmethod
    def of_texts(cls, prompts: Sequence[str], completions: Sequence[str], tokenizer: Tokenizer) -> Samples:
        """Plain texts, tokenised on their own. A text that was not sampled counts as finished."""
        completions = list(completions)
        rows = tokenizer(completions, add_special_tokens=False)["input_ids"] if completions else []
        return cls(list(prompts), completions, rows, [True] * len(completions))

    @classmethod
    def finished(cls, parts: Sequence[Samples]) -> Samples:
        """The texts of several, each taken as finished."""
        prompts = [prompt for part in parts for prompt in part.prompts]
        completions = [completion for part in parts for completion in part.completions]
        return cls(prompts, completions, [[]] * len(prompts), [True] * len(prompts))

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.completion_ids]

    @cached_property
    def conversations(self) -> list[list[Turn]]:
        """The turns of each episode, with what the policy read; empty where responses are no episodes."""
        if self.tokens is None or self.tokens.observed is None:
            return self.said or [[] for _ in self.completions]
        decode, found = self.tokens.tokenizer.decode, list[list[Turn]]()
        for ids, chosen in zip(self.completion_ids, self.tokens.mask.tolist(), strict=True):
            runs = groupby(zip(ids, chosen, strict=False), key=lambda each: each[1])  # `chosen` is padded
            turns = [(own, [token for token, _ in run]) for own, run in runs]
            found.append(
                [
                    Turn(role=ASSISTANT if own else ENVIRONMENT, text=decode(turn, skip_special_tokens=True))
                    for own, turn in turns
                ]
            )
        return found

    @property
    def turns(self) -> list[list[Turn]]:
        """What was said after each prompt: the completion; in an episode also what was read."""
        if self._are_episodes:
            return self.conversations
        return [[Turn(role=ASSISTANT, text=completion)] for completion in self.completions]

    @property
    def own_turns(self) -> list[list[str]]:
        """What the policy itself said, without what it read."""
        return [[turn["text"] for turn in said if turn["role"] == ASSISTANT] for said in self.turns]

    @property
    def own_ids(self) -> list[list[int]]:
        """The response tokens that the policy chose, without those it read."""
        if self.tokens is None or self.tokens.observed is None:
            return self.completion_ids
        both = zip(self.completion_ids, self.tokens.mask.tolist(), strict=True)
        return [[token for token, own in zip(ids, chosen, strict=False) if own] for ids, chosen in both]

    @property
    def _are_episodes(self) -> bool:
        return bool(self.said) or (self.tokens is not None and self.tokens.observed is not None)

    @property
    def answers(self) -> list[str]:
        """What the policy said last."""
        return [turns[-1] if turns else "" for turns in self.own_turns]

    @property
    def full_texts(self) -> list[str]:
        return [
            prompt + completion for prompt, completion in zip(self.prompts, self.completions, strict=True)
        ]

    def columns(self) -> dict[str, list[object]]:
        """The columns that every prompt has."""
        rows = [columns_of(prompt) for prompt in self.prompts]
        names = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
        return {name: [row[name] for row in rows] for name in names}

    def part(self, start: int, stop: int) -> Samples:
        """A slice, without the rollout's tokens."""
        here = slice(start, stop)
        said = self.conversations[here] if self._are_episodes else []
        return Samples(
            self.prompts[here], self.completions[here], self.completion_ids[here], self.ended[here], said=said
        )


def columns_of(prompt: str) -> Columns:
    return getattr(prompt, "columns", {})


def tokens_of(
    prompts: list[str],
    completion_ids: list[list[int]],
    ended: list[bool],
    tokenizer: Tokenizer,
    device: torch.device | str,
) -> Tokens:
    """A rollout's record, from prompts and the ids that were sampled after them."""
    prompt_rows = encode_prompts(tokenizer, prompts)
    prompt_ids, prompt_mask = pad_rows(prompt_rows, left=True)
    response_ids, mask = pad_rows(completion_ids)
    tokens = Tokens(
        prompts=prompts,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids,
        mask=mask,
        ended=torch.tensor(ended, dtype=torch.bool),
        truncated=torch.zeros(len(prompts), dtype=torch.bool),
        keys=sequence_keys(prompt_rows),
        tokenizer=tokenizer,
    )
    return tokens.map(lambda tensor: tensor.to(device))
