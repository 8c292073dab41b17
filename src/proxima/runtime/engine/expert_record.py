"""`ExpertRecord`: which experts the tokens of a batch went to while it was sampled.

It keeps its address from step to step, so that a decode step can be a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxima.core.recorded_experts import RecordedExperts, expert_dtype, unrecorded
from proxima.core.types import Tokens
from proxima.runtime.engine.experts import Routing

if TYPE_CHECKING:
    from proxima.runtime.engine.decoder import Decoder


@dataclass(frozen=True)
class ExpertRecord:
    """One row per prompt, and one more for what is never read; by a token's position in its sequence."""

    experts: Tensor  # (B + 1, S, L, K)

    @property
    def positions(self) -> int:
        return self.experts.shape[1]

    def reset(self) -> None:
        self.experts.fill_(unrecorded(self.experts.dtype))

    def write(
        self, routing: Routing, rows: Tensor, positions: Tensor, running: Tensor | None, read: Tensor | None
    ) -> None:
        """Write what a pass chose for N tokens.

        Args:
            running: (N,) which of them to write; None = all.
            read: those that the last layer computed; None = all.
        """
        place = rows * self.positions + positions
        cells = self.experts.flatten(0, 1)
        if running is not None:
            place = torch.where(running, place, len(cells) - 1)
        last = self.experts.shape[2] - 1
        for layer, chosen in routing.chosen.items():
            here = place if read is None or layer < last else place[read]
            cells[:, layer].index_copy_(0, here, chosen.to(cells.dtype))

    def collect(self, prompts: Tokens, width: int) -> RecordedExperts:
        """Those of the prompts, and of `width` response tokens."""
        count, columns = prompts.prompt_ids.shape
        device, sizes = self.experts.device, prompts.prompt_mask.sum(1, keepdim=True)
        rows = torch.arange(count, device=device).unsqueeze(1)
        before = torch.arange(columns, device=device) - (columns - sizes)  # (B, P), negative on padding
        after = torch.arange(width, device=device) + sizes
        prompt = self.experts[rows, before.clamp(min=0)]
        padding = (before < 0)[..., None, None]
        return RecordedExperts(
            prompt.masked_fill(padding, unrecorded(prompt.dtype)), self.experts[rows, after]
        )


def new_expert_record(count: int, size: int, decoder: Decoder, device: torch.device) -> ExpertRecord | None:
    """For this many prompts, and sequences of up to `size` tokens; None where the decoder has no experts."""
    experts = decoder.blocks[0].experts
    if experts is None:
        return None
    shape = (count + 1, size, len(decoder.blocks), experts.per_token)
    return ExpertRecord(torch.zeros(shape, dtype=expert_dtype(experts.total), device=device))
