"""`ValueModel`: the expected reward-to-go V(s_t) of a state, read at the token before action t."""

from __future__ import annotations

from torch import Tensor, nn

from proxima.core.recorded_experts import RecordedExperts
from proxima.core.types import Tokens
from proxima.models.base_model import BaseModel
from proxima.models.response_tokens import unpack
from proxima.runtime.engine import pack_mask


class ValueModel(BaseModel):
    """Base with the value adapter and a scalar head; or a head on the policy's trunk (`shares_policy`)."""

    shares_policy = False

    @property
    def replays_experts(self) -> bool:
        return self.shares_policy

    def parameters(self) -> list[nn.Parameter]:
        """With a shared trunk only the head; the policy's optimiser trains the trunk."""
        if self.shares_policy and self.head is not None:
            return list(self.head.parameters())
        return super().parameters()

    def response_values(self, tokens: Tokens) -> Tensor:
        """Values (B, R) of the states before each response token."""
        return unpack(self.head_values(self.response_hidden(tokens)), tokens)

    def last_values(self, ids: Tensor, mask: Tensor, experts: RecordedExperts | None = None) -> Tensor:
        """Value (B,) of each padded state, read at its last token."""
        recorded = experts.whole if experts is not None and self.replays_experts else None
        return self.head_values(self.backbone.hidden(ids, pack_mask(mask), self.adapter, recorded))
