"""`Transcript`: the tokens of a batch of episodes while they are sampled.

In: the policy's turns, and the replies of a `Conversation`. Out: prefixes to sample from, and the masks of
what the policy chose and of what it read. Ids are kept as they were sampled; nothing is tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proxima.core.encoding import pad_rows
from proxima.core.episode import Conversation
from proxima.core.sampling import Sampling
from proxima.core.types import Tokens


class Transcript:
    """What follows each prompt of a batch."""

    def __init__(self, prompts: Tokens, sampling: Sampling, conversation: Conversation):
        self.sampling, self.conversation = sampling, conversation
        ids, mask = prompts.prompt_ids.cpu(), prompts.prompt_mask.cpu()
        self.prompts: list[list[int]] = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
        self.ids: list[list[int]] = [[] for _ in self.prompts]
        self.chosen: list[list[bool]] = [[] for _ in self.prompts]
        self.awaited: set[int] = set()  # rows whose reply has not come
        self.device = prompts.keys.device

    def starts(self, rows: Sequence[int]) -> Tensor:
        """(n,) column in which the next turn of each row begins, on the device."""
        return torch.tensor([len(self.ids[row]) for row in rows], device=self.device, dtype=torch.long)

    def limits(self, starts: Tensor) -> Tensor:
        """(n,) column before which a turn that begins there must end."""
        return (starts + self.sampling.max_new_tokens).clamp(max=self.sampling.width)

    def prefixes(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids (n, T), padded on the left, and their mask: everything before the next turn of each row."""
        ids, mask = pad_rows([self.prompts[row] + self.ids[row] for row in rows], left=True)
        return ids.to(self.device), mask.to(self.device)

    def end_turn(self, row: int, ids: Sequence[int]) -> None:
        """Take the tokens of a turn, up to its first EOS, and ask for the reply.

        Args:
            ids: from the turn's first column on; what follows an EOS is not part of it.
        """
        ends = [place for place, token in enumerate(ids) if token in self.sampling.eos_ids]
        turn = list(ids[: ends[0] + 1] if ends else ids)
        self.ids[row] += turn
        self.chosen[row] += [True] * len(turn)
        self.awaited.add(row)
        self.conversation.finish_turn(row, turn)

    def take_replies(self, wait: bool) -> list[int]:
        """Read the replies that have come; the rows that have another turn.

        Args:
            wait: until there is one, or no reply is to come.
        """
        ready: list[int] = []
        while self.awaited:
            for reply in self.conversation.replies(wait):
                self.awaited.remove(reply.row)
                self.ids[reply.row] += reply.ids
                self.chosen[reply.row] += [False] * len(reply.ids)
                if reply.goes_on:
                    ready.append(reply.row)
            if ready or not wait:
                break
        return sorted(ready)

    def responses(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, and masks of what was chosen and of what was read (B, R), on the device."""
        ids, real = pad_rows(self.ids)
        chosen = torch.zeros_like(real)
        for row, flags in enumerate(self.chosen):
            chosen[row, : len(flags)] = torch.tensor(flags, dtype=torch.bool)
        return ids.to(self.device), chosen.to(self.device), (real & ~chosen).to(self.device)
