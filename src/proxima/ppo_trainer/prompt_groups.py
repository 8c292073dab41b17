"""Several responses per prompt (`num_generations`): prompts repeated in a step, and which responses belong
together.

Advantages are computed over the whole rollout, before it is cut into minibatches, so that a group need not
stay whole in them. A response that is not trained on, because its reward failed or it was cut, leaves its
group: the others are compared among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proxima.advantage import Outcome, group_scores
from proxima.core.pairs import TokenPairs


def repeat_prompts(prompts: Sequence[str], count: int) -> Sequence[str]:
    """Each prompt `count` times, one prompt after the other."""
    if count == 1 or isinstance(prompts, str):  # a text is refused where prompts are read
        return prompts
    return [prompt for prompt in prompts for _ in range(count)]


def with_groups(rollout: TokenPairs, count: int) -> TokenPairs:
    """Pairs with `group`, the number of each response's prompt; unchanged where each has one response."""
    if count == 1:
        return rollout
    numbers = torch.arange(rollout.batch_size, device=rollout.mask.device) // count
    return rollout.with_columns(group=numbers.float().unsqueeze(1).expand(rollout.mask.shape))


def group_metrics(pairs: TokenPairs, scores: Tensor) -> dict[str, float]:
    """The share of groups that teach nothing, where there are groups.

    Args:
        scores: (B, R), as `Outcome` has them.
    """
    if "group" not in pairs.columns:
        return {}
    found = group_scores(Outcome.of_pairs(pairs, scores))
    groups = 1 / found.sizes  # summed over a group: 1
    return {"equal_groups": float(groups[found.equal].sum() / groups.sum())}
