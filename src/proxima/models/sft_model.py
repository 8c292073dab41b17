"""`SFTModel`: the frozen reference of the KL.

In: a rollout's tokens. Out: logits (B, R, V), never a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proxima.core.types import Tokens
from proxima.models.base_model import BaseModel


class SFTModel(BaseModel):
    """The base itself, or the base with the frozen adapter of supervised fine-tuning."""

    def parameters(self) -> list[torch.nn.Parameter]:
        return []

    @torch.no_grad()
    def response_hidden(self, tokens: Tokens) -> Tensor:
        return super().response_hidden(tokens)
