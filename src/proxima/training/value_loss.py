"""Value loss: squared error (V(s_t) - return_t)^2; clipped, the larger of it and the error of a value held
near the old."""

from __future__ import annotations

import torch
from torch import Tensor

from proxima.core.ops import at_least_float32


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, value_clip: float = 0.0
) -> Tensor:
    """Per-token loss, (B, R) -> (B, R); `value_clip` 0 is off, otherwise `old_values` are needed."""
    values, returns = at_least_float32(values), at_least_float32(returns)
    loss = (values - returns) ** 2
    if value_clip > 0:
        if old_values is None:
            raise ValueError(f"value_clip ({value_clip}) needs old_values")
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return loss
