"""`SFTModel`: the frozen reference model of the KL penalty. It gives logits, never gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from proxima.core.types import Tokens
from proxima.models.base_model import BaseModel


class SFTModel(BaseModel):
    """The base, alone or with the frozen adapter of supervised fine-tuning."""

    def parameters(self) -> list[torch.nn.Parameter]:
        return []

    @torch.no_grad()
    def response_hidden(self, tokens: Tokens) -> Tensor:
        return super().response_hidden(tokens)
