"""The seeds of a step's environments: they follow from the run's seed, the step and the prompt alone."""

from __future__ import annotations

import torch
from torch import Tensor

from proxima.core.sampling import Sampling, hash_words
from proxima.core.types import Tokens

STREAM = 0x3C6EF372  # apart from the noise of sampling and shuffling


def environment_seeds(tokens: Tokens, sampling: Sampling, group: int) -> Tensor:
    """(B,) on the CPU, 31 bits each. Responses to one prompt of a group meet the same environment.

    Args:
        group: responses per prompt, one after the other.
    """
    lanes = hash_words(tokens.keys.cpu(), sampling.seed, sampling.step, STREAM)
    rows = list(range(len(tokens.prompts)))
    first = [
        row - row % group if tokens.prompts[row - row % group] == tokens.prompts[row] else row for row in rows
    ]
    return lanes[torch.tensor(first, dtype=torch.long), 0] & 0x7FFFFFFF
