"""Generalised advantage estimation (Schulman et al.

2016): A_t = delta_t + gamma * lam * A_{t+1}, within a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from proxima.advantage.return_calculator import discounted_sum
from proxima.advantage.td_error import TDError, td_errors
from proxima.core.ops import at_least_float32, place_rewards
from proxima.core.pairs import SAPairs, as_pairs


class GAEAdvantage:
    """Adds `advantage` to state-action pairs (and `td_error`, where it is not there yet)."""

    def compute_gae_advantages(
        self, sa_pairs: SAPairs | Iterable[Mapping[str, Any]], gamma: float, lam: float
    ) -> SAPairs:
        pairs = as_pairs(sa_pairs)
        if "td_error" not in pairs.columns:
            pairs = TDError().compute_td_errors(pairs, gamma)
        return pairs.with_columns(advantage=discounted_sum(pairs.column("td_error"), pairs.mask, gamma * lam))


def compute_advantages(
    rewards: float | Sequence[Any] | Tensor,
    values: Sequence[Any] | Tensor,
    gamma: float = 0.99,
    lam: float = 0.95,
    mask: Tensor | None = None,
) -> tuple[Any, Any]:
    """Advantages and returns = advantages + values, from plain numbers or tensors.

    Args:
        rewards: one a token; or one a sequence, which then sits on the last token.
        values: a flat list (one sequence), a ragged list of lists, or a padded (B, R) tensor.
        mask: (B, R) with a tensor: True where a token is real (all, if not given).
    Returns: (advantages, returns) in the form of `values`.

    >>> compute_advantages([1.0], [0.5, 0.5], gamma=1.0, lam=1.0)
    ([0.5, 0.5], [1.0, 1.0])
    """
    if hasattr(values, "__array__") and not isinstance(values, Tensor):  # numpy
        values = torch.as_tensor(values)
    if isinstance(values, Tensor):
        values = at_least_float32(values)
    if isinstance(values, Tensor) and values.dim() == 2:
        grid, real = values, torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        return _advantages(place_rewards(rewards, real, grid), grid, real, gamma, lam)
    flat = not len(values) or not isinstance(values[0], (list, tuple, Tensor))
    rows = [values] if flat else list(values)
    lengths = [len(row) for row in rows]
    if not rows or not all(lengths):
        raise ValueError(f"every sequence needs at least one value, got lengths {lengths}")
    dtype, device = (values.dtype, values.device) if isinstance(values, Tensor) else (torch.float64, None)
    grid = torch.zeros(len(rows), max(lengths), dtype=dtype, device=device)
    real = torch.zeros_like(grid, dtype=torch.bool)
    for i, row in enumerate(rows):
        grid[i, : lengths[i]] = torch.as_tensor(row, dtype=dtype)
        real[i, : lengths[i]] = True
    scores: Any = rewards
    if flat:
        numbers = torch.as_tensor(rewards, dtype=dtype).flatten().tolist()
        scores = numbers if len(numbers) == 1 else [numbers]
    advantages, returns = _advantages(place_rewards(scores, real, grid), grid, real, gamma, lam)
    if isinstance(values, Tensor):
        return advantages[0], returns[0]
    lists = [
        [row[:n].tolist() for row, n in zip(table, lengths, strict=True)] for table in (advantages, returns)
    ]
    return (lists[0][0], lists[1][0]) if flat else (lists[0], lists[1])


def _advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    advantages = discounted_sum(td_errors(rewards, values, mask, gamma), mask, gamma * lam)
    return advantages, advantages + values
