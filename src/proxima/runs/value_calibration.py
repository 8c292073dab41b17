"""Where the value model is off. In: values and returns of a rollout. Out: the mean of return - value by
quarter of the response, and by quartile of the value.

By position: an error that grows towards the start says that the values do not see the score coming. By value:
errors of opposite sign at both ends say that high and low values are too far apart, or too close together.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 4


def value_calibration(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Metrics by name, from (B, R); nan for a part without tokens."""
    index = mask.cumsum(1) - 1  # of a token among the real ones of its response
    by_position = (PARTS * index // mask.sum(1, keepdim=True).clamp(min=1))[mask]
    flat, errors = values[mask], (returns - values)[mask]
    order = errors.argsort(stable=True)  # between equal values the error decides, not the place in the batch
    order = order[flat[order].argsort(stable=True)]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    by_value = PARTS * ranks // max(len(ranks), 1)
    found = {"position": _means(errors, by_position), "quantile": _means(errors, by_value)}
    return {
        f"value_error_{kind}/{part + 1}": mean
        for kind, means in found.items()
        for part, mean in enumerate(means)
    }


def _means(errors: Tensor, parts: Tensor) -> list[float]:
    errors, parts = errors.cpu(), parts.cpu()  # MPS has no float64
    sums = torch.zeros(PARTS, dtype=torch.float64)
    means = sums.index_add(0, parts, errors.double()) / torch.bincount(parts, minlength=PARTS)
    return means.tolist()
