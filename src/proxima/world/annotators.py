"""Simulated annotators. In: a post and two summaries. Out: a noisy choice (Bradley-Terry on the gold score),
with one bias.

P(first) = sigmoid((u(first) - u(second)) / NOISE), u = gold + BIAS if the summary opens with "basically,".
The bias is documented so that everyone can watch a policy exploit its reward model: the opening adds nothing
to the gold score.
"""

from __future__ import annotations

import math
import random

from proxima.world.gold import gold_score
from proxima.world.posts import Post
from proxima.world.words import OPENING

NOISE = 0.08
BIAS = 0.15


class Annotator:
    """Chooses between summaries; the same seed makes the same choices."""

    def __init__(self, seed: int = 0, noise: float = NOISE, bias: float = BIAS):
        self.noise = noise
        self.bias = bias
        self._rng = random.Random(f"annotator {seed}")

    def utility(self, post: Post, summary: str, ended: bool = True) -> float:
        return gold_score(post, summary, ended) + self.bias * summary.strip().lower().startswith(OPENING)

    def prefers_first(self, post: Post, first: tuple[str, bool], second: tuple[str, bool]) -> bool:
        """
        Args:
            first, second: a summary, and whether it is finished (ends with EOS).
        """
        margin = (self.utility(post, *first) - self.utility(post, *second)) / self.noise
        return self._rng.random() < 1 / (1 + math.exp(-max(-60.0, min(60.0, margin))))
