"""`RecordedExperts`: the experts of a mixture that each token of a rollout went to when it was sampled.

Scoring and training replay them: L layers times K experts, of one byte each, per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


def expert_dtype(experts: int) -> torch.dtype:
    """The smallest type that numbers this many experts and leaves its largest number for `unrecorded`."""
    return torch.uint8 if experts <= torch.iinfo(torch.uint8).max else torch.int16


def unrecorded(dtype: torch.dtype) -> int:
    """What stands where no expert is recorded: the router chooses there."""
    return torch.iinfo(dtype).max


@dataclass(frozen=True)
class RecordedExperts:
    """Padded as prompts and responses are. A response's last token has none: no pass has read it."""

    prompt: Tensor  # (B, P, L, K)
    response: Tensor  # (B, R, L, K)

    @property
    def whole(self) -> Tensor:
        return torch.cat([self.prompt, self.response], 1)  # (B, T, L, K)

    def map(self, function: Callable[[Tensor], Tensor]) -> RecordedExperts:
        return RecordedExperts(function(self.prompt), function(self.response))

    def resized(self, prompts: int, responses: int) -> RecordedExperts:
        """Cut or padded to `prompts` and `responses` tokens, prompts on the left."""
        before, after = prompts - self.prompt.shape[1], responses - self.response.shape[1]
        fill = unrecorded(self.prompt.dtype)
        return RecordedExperts(
            pad(self.prompt, (0, 0, 0, 0, before, 0), value=fill),
            pad(self.response, (0, 0, 0, 0, 0, after), value=fill),
        )

    @staticmethod
    def cat(parts: Sequence[RecordedExperts | None], prompts: int, responses: int) -> RecordedExperts | None:
        """Several under each other; None where a part has none."""
        fitted = [part.resized(prompts, responses) for part in parts if part is not None]
        if len(fitted) < len(parts):
            return None
        return RecordedExperts(
            torch.cat([part.prompt for part in fitted]), torch.cat([part.response for part in fitted])
        )
