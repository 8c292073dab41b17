"""Best-of-n: of n samples of the reference, the one that the reward likes best; what PPO is compared with.

Its KL to the reference is at most log n - (n - 1) / n (Stiennon et al. 2020; a bound: Beirami et al. 2024).
From N >= n samples per prompt, the mean over all choices of n of them: in order of the reward, the lowest
first, the i-th of N is the best of n with the chance C(i - 1, n - 1) / C(N, n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Scored = Sequence[tuple[float, float]]  # of one prompt's samples: the reward, and what is averaged


def best_of_kl(n: int) -> float:
    """Upper bound of its KL to the model that is sampled, in nats."""
    return math.log(n) - (n - 1) / n


def best_of_mean(groups: Sequence[Scored], n: int) -> float:
    """Mean over prompts of what the best of n samples is worth; samples with a nan are left out, prompts with
    fewer than n others too. nan where none is left."""
    known = [[pair for pair in group if not any(map(math.isnan, pair))] for group in groups]
    means = [_expected(group, n) for group in known if len(group) >= n]
    return math.fsum(means) / len(means) if means else math.nan


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    powers = [2**exponent for exponent in range(most.bit_length())]
    return powers if powers[-1] == most else [*powers, most]


def _expected(group: Scored, n: int) -> float:
    ordered = sorted(group, key=lambda pair: pair[0])
    ways = math.comb(len(ordered), n)
    return math.fsum(value * (math.comb(place, n - 1) / ways) for place, (_, value) in enumerate(ordered))
