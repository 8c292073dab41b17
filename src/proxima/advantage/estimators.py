"""Advantages and value targets from rewards and values: one function per estimator, found by its name.

In: rewards and values (B, R). Out: advantages that are not whitened, and what the value model learns.

    gae   generalised advantage estimation; the target is A_t + V(s_t) (`lambda_return`) or the discounted
          reward-to-go (`reward_to_go`)

A new estimator is a function like `gae`, and its name in `ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from proxima.advantage.gae_advantage import GAEAdvantage
from proxima.advantage.return_calculator import ReturnCalculator
from proxima.advantage.td_error import TDError
from proxima.core.ops import at_least_float32, place_rewards, whiten
from proxima.core.pairs import PlainPairs, SAPairs, rejoin

AnyPairs = TypeVar("AnyPairs", bound=SAPairs)


class GAEParts(NamedTuple):
    """The three formulas of GAE; each may be replaced by anything with the same method."""

    td_error: TDError = TDError()
    gae_advantage: GAEAdvantage = GAEAdvantage()
    return_calculator: ReturnCalculator = ReturnCalculator()


class Estimate(NamedTuple):
    """Both (B, R)."""

    advantages: Tensor  # not whitened
    targets: Tensor  # of the value model


def gae(pairs: SAPairs, gamma: float, lam: float, value_target: str, parts: GAEParts) -> SAPairs:
    """Pairs with `td_error`, `advantage` and `return`."""
    found = parts.td_error.compute_td_errors(pairs, gamma)
    found = rejoin(parts.gae_advantage.compute_gae_advantages(found, gamma, lam), pairs)
    if value_target == "lambda_return":
        return found.with_columns(**{"return": found.column("advantage") + found.column("value")})
    return rejoin(parts.return_calculator.add_reward_to_go(found, gamma), pairs)


ESTIMATORS: dict[str, Callable[[SAPairs, float, float, str, GAEParts], SAPairs]] = {"gae": gae}


def add_estimates(
    pairs: SAPairs,
    gamma: float,
    lam: float,
    value_target: str,
    parts: GAEParts | None = None,
    estimator: str = "gae",
) -> SAPairs:
    """Pairs with `reward` and `value` in; out with `advantage`, not whitened, and `return`, the target.

    Args:
        value_target: `lambda_return` or `reward_to_go`.
        parts: what GAE is computed by, where a part was replaced.
    """
    return ESTIMATORS[estimator](pairs, gamma, lam, value_target, parts or GAEParts())


def estimate(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    value_target: str = "lambda_return",
    estimator: str = "gae",
) -> Estimate:
    """What `add_estimates` computes, from tensors (B, R)."""
    pairs = PlainPairs(mask, {"reward": rewards, "value": values})
    found = add_estimates(pairs, gamma, lam, value_target, estimator=estimator)
    return Estimate(found.column("advantage"), found.column("return"))


def whiten_advantages(pairs: AnyPairs) -> AnyPairs:
    """Advantages of mean 0 and unit variance over all real tokens; the targets stay as they are."""
    return pairs.with_columns(advantage=whiten(pairs.column("advantage"), pairs.mask))


def compute_advantages(
    rewards: float | Sequence[Any] | Tensor,
    values: Sequence[Any] | Tensor,
    gamma: float = 0.99,
    lam: float = 0.95,
    mask: Tensor | None = None,
) -> tuple[Any, Any]:
    """Advantages and returns = advantages + values, from plain numbers or tensors.

    Args:
        rewards: one per token; or one per sequence, which then sits on the last token.
        values: a flat list or tensor (one sequence), a ragged list of lists, or a padded (B, R) tensor.
        mask: (B, R) with a tensor: True where a token is real (all, if not given).
    Returns: (advantages, returns) in the form of `values`.

    >>> compute_advantages([1.0], [0.5, 0.5], gamma=1.0, lam=1.0)
    ([0.5, 0.5], [1.0, 1.0])
    """
    if hasattr(values, "__array__"):  # a tensor, or an array of numpy
        table = at_least_float32(torch.as_tensor(values))
        if table.dim() == 2:
            real = torch.ones_like(table, dtype=torch.bool) if mask is None else mask
            advantages, returns = estimate(place_rewards(rewards, real, table), table, real, gamma, lam)
            return advantages, returns
        grid = table.unsqueeze(0)
        advantages, returns = compute_advantages(_one_row(rewards, grid.dtype), grid, gamma, lam)
        return advantages[0], returns[0]
    flat = not len(values) or not torch.as_tensor(values[0]).dim()
    rows = [values] if flat else list(values)
    lengths = [len(row) for row in rows]
    if not rows or not all(lengths):
        raise ValueError(f"every sequence needs at least one value, got lengths {lengths}")
    grid = torch.zeros(len(rows), max(lengths), dtype=torch.float64)
    real = torch.zeros_like(grid, dtype=torch.bool)
    for i, row in enumerate(rows):
        grid[i, : lengths[i]] = torch.as_tensor(row, dtype=grid.dtype)
        real[i, : lengths[i]] = True
    scores = _one_row(rewards, grid.dtype) if flat else rewards
    found = estimate(place_rewards(scores, real, grid), grid, real, gamma, lam)
    lists = [_ragged(table, lengths) for table in found]
    return (lists[0][0], lists[1][0]) if flat else (lists[0], lists[1])


def _one_row(rewards: float | Sequence[Any] | Tensor, dtype: torch.dtype) -> list[Any]:
    """The rewards of one sequence: its one number, or one number per token."""
    numbers = torch.as_tensor(rewards, dtype=dtype).flatten().tolist()
    return numbers if len(numbers) == 1 else [numbers]


def _ragged(table: Tensor, lengths: list[int]) -> list[list[float]]:
    return [row[:length].tolist() for row, length in zip(table, lengths, strict=True)]
