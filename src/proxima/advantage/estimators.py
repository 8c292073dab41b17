"""Advantages and value targets from what a rollout earned: one function per estimator, found by its name.

    gae                           generalised advantage estimation; the only one with a value model
    rloo                          score minus the mean of the group's other scores
    grpo, dr_grpo                 score minus the group's mean, divided by its std or not
    reinforce_plus_plus           score, to be whitened over all tokens
    reinforce_plus_plus_baseline  the same, minus the group's mean

In: an `Outcome`. Out: its `Credit`; whitening is done after it. A new estimator is a function like `gae`, and
its name in `ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar, cast, overload

import torch
from torch import Tensor

from proxima.advantage.gae import GAEParts, Terms, gae
from proxima.advantage.grpo import dr_grpo, grpo
from proxima.advantage.outcome import Credit, Outcome
from proxima.advantage.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from proxima.advantage.rloo import rloo
from proxima.core.ops import at_least_float32, place_rewards, whiten
from proxima.core.pairs import SAPairs

AnyPairs = TypeVar("AnyPairs", bound=SAPairs)
Rewards: TypeAlias = float | Sequence[object] | Tensor

ESTIMATORS: dict[str, Callable[[Outcome, Terms], Credit]] = {
    "gae": gae,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}


def estimate(
    name: str,
    outcome: Outcome,
    gamma: float,
    lam: float,
    lam_alpha: float = 0.0,
    value_lam: float | None = None,
    parts: GAEParts | None = None,
    by_turns: bool = False,
) -> Credit:
    """Advantages that are not whitened, and what the value model learns.

    Args:
        name: of an estimator in `ESTIMATORS`.
        lam_alpha: above 0, lambda grows with a response's length, and `lam` is not used.
        value_lam: lambda of the value model's target, 1 for the reward-to-go; None: the policy's.
        parts: what GAE is computed by, where a part was replaced.
        by_turns: gamma and lambda act at the ends of turns alone.
    """
    return ESTIMATORS[name](outcome, Terms(gamma, lam, lam_alpha, value_lam, parts or GAEParts(), by_turns))


def add_credit(pairs: AnyPairs, credit: Credit) -> AnyPairs:
    """Pairs with `advantage`; `td_error` and `return` where the estimator gives them."""
    found = {"td_error": credit.td_errors, "advantage": credit.advantages, "return": credit.targets}
    return pairs.with_columns(**{name: column for name, column in found.items() if column is not None})


def whiten_advantages(pairs: AnyPairs) -> AnyPairs:
    """Advantages of mean 0 and unit variance over all real tokens; the targets stay as they are."""
    return pairs.with_columns(advantage=whiten(pairs.column("advantage"), pairs.mask))


@overload
def compute_advantages(
    rewards: Rewards, values: Tensor, gamma: float = ..., lam: float = ..., mask: Tensor | None = ...
) -> tuple[Tensor, Tensor]: ...
@overload
def compute_advantages(
    rewards: Rewards, values: Sequence[float], gamma: float = ..., lam: float = ..., mask: None = ...
) -> tuple[list[float], list[float]]: ...
@overload
def compute_advantages(
    rewards: Rewards,
    values: Sequence[Sequence[float]],
    gamma: float = ...,
    lam: float = ...,
    mask: None = ...,
) -> tuple[list[list[float]], list[list[float]]]: ...
def compute_advantages(
    rewards: Rewards,
    values: Sequence[float] | Sequence[Sequence[float]] | Tensor,
    gamma: float = 0.99,
    lam: float = 0.95,
    mask: Tensor | None = None,
) -> tuple[object, object]:
    """Advantages and returns = advantages + values, from plain numbers or tensors.

    Args:
        rewards: one per token; or one per sequence, which then sits on the last token.
        values: a flat list or tensor (one sequence), a ragged list of lists, or a padded (B, R) tensor.
        mask: (B, R) with a tensor: True where a token is real (all, if not given).
    Returns: (advantages, returns) in the form of `values`.

    >>> compute_advantages([1.0], [0.5, 0.5], gamma=1.0, lam=1.0)
    ([0.5, 0.5], [1.0, 1.0])
    """
    by_sequence = cast("Sequence[object] | Tensor", rewards)  # one number is one sequence's
    if hasattr(values, "__array__"):  # a tensor, or an array of numpy
        table = at_least_float32(torch.as_tensor(values))
        if table.dim() == 2:
            real = torch.ones_like(table, dtype=torch.bool) if mask is None else mask
            return _gae_of(place_rewards(by_sequence, real, table), table, real, gamma, lam)
        grid = table.unsqueeze(0)
        advantages, returns = compute_advantages(_one_row(rewards, grid.dtype), grid, gamma, lam)
        return advantages[0], returns[0]
    flat = not len(values) or not torch.as_tensor(values[0]).dim()
    rows = cast("list[Sequence[float]]", [values] if flat else list(values))
    lengths = [len(row) for row in rows]
    if not rows or not all(lengths):
        raise ValueError(f"every sequence needs at least one value, got lengths {lengths}")
    grid = torch.zeros(len(rows), max(lengths), dtype=torch.float64)
    real = torch.zeros_like(grid, dtype=torch.bool)
    for i, row in enumerate(rows):
        grid[i, : lengths[i]] = torch.as_tensor(row, dtype=grid.dtype)
        real[i, : lengths[i]] = True
    scores = _one_row(rewards, grid.dtype) if flat else by_sequence
    found = _gae_of(place_rewards(scores, real, grid), grid, real, gamma, lam)
    lists = [_ragged(table, lengths) for table in found]
    return (lists[0][0], lists[1][0]) if flat else (lists[0], lists[1])


def _gae_of(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    found = estimate("gae", Outcome(rewards, torch.zeros_like(rewards), mask, values), gamma, lam)
    assert found.targets is not None
    return found.advantages, found.targets


def _one_row(rewards: Rewards, dtype: torch.dtype) -> list[object]:
    """The rewards of one sequence: its one number, or one number per token."""
    numbers = torch.as_tensor(rewards, dtype=dtype).flatten().tolist()
    return numbers if len(numbers) == 1 else [numbers]


def _ragged(table: Tensor, lengths: list[int]) -> list[list[float]]:
    return [row[:length].tolist() for row, length in zip(table, lengths, strict=True)]
