"""Judges a policy by the world's gold score.

In: a trainer and held-out posts. Out: scores, and the reward model's accuracy by gap in gold score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from proxima.core.json_record import Record
from proxima.evaluator import best_of_kl, best_of_mean, powers_up_to
from proxima.finetuning import Preference
from proxima.ppo_trainer import PPOTrainer, followed_records
from proxima.runs import rollout_metrics, with_unit
from proxima.world.gold import gold_score
from proxima.world.posts import Post, facts_of

VALIDATION_STEP = -1  # both sides are sampled with the same noise
RECORDS = 6
BEST_OF_ROWS = 256  # sampled at once
GAPS = (0.0, 0.1, 0.2, 0.4, 0.6, 1.01)


@dataclass(frozen=True)
class Judgement:
    """One summary per post, and its scores."""

    texts: list[str]
    gold: list[float]
    score: list[float]  # the reward model's
    kl: float
    response_length: float
    eos_rate: float
    records: list[Record]  # the first few, token by token

    ROWS: ClassVar[dict[str, str]] = {
        "gold score": "gold",
        "reward-model score": "score",
        **{with_unit(name): name for name in ("kl", "response_length", "eos_rate")},
    }

    def summary(self) -> dict[str, float]:
        means = {"gold": sum(self.gold) / len(self.gold), "score": sum(self.score) / len(self.score)}
        return {**means, "kl": self.kl, "response_length": self.response_length, "eos_rate": self.eos_rate}


def judge(trainer: PPOTrainer, posts: Sequence[Post]) -> Judgement:
    """Sample the policy as it is now, at the temperature it was trained with."""
    pairs, texts = trainer.generator.generate_sequences([post.prompt for post in posts], VALIDATION_STEP)
    gold = [gold_score(*row) for row in zip(posts, texts, pairs.tokens.ended.tolist(), strict=True)]
    measured = rollout_metrics(pairs)
    scores = trainer.reward_computer.score_pairs(pairs)
    first = torch.arange(min(RECORDS, len(posts)))
    return Judgement(
        texts,
        gold,
        scores.total.tolist(),
        kl=measured["kl_exact"],
        response_length=measured["response_length"],
        eos_rate=measured["eos_rate"],
        records=followed_records(trainer, pairs.select(first), scores.select(first)),
    )


def judge_best_of(trainer: PPOTrainer, posts: Sequence[Post], most: int) -> list[dict[str, float]]:
    """For n = 1, 2, 4, ... `most`: `n`, and as in `Judgement.summary` the means over posts of the best of n
    samples of the reference by the reward model, with the bound of its KL."""
    rows: list[list[tuple[float, dict[str, float]]]] = []
    seen: dict[bytes, int] = {}
    for start in range(0, len(posts), chunk := max(1, BEST_OF_ROWS // most)):
        repeated = [post for post in posts[start : start + chunk] for _ in range(most)]
        prompts = trainer.generator.read_prompts([post.prompt for post in repeated], seen)
        tokens = trainer.generator.sample(prompts, VALIDATION_STEP, reference=True)
        scores = trainer.reward_computer.score_tokens(tokens).total.tolist()
        columns = zip(
            repeated, tokens.texts(), tokens.ended.tolist(), tokens.sizes.tolist(), scores, strict=True
        )
        drawn = [
            (
                score,
                {
                    "gold": gold_score(post, text, ended),
                    "score": score,
                    "response_length": size,
                    "eos_rate": ended,
                },
            )
            for post, text, ended, size, score in columns
        ]
        rows += [drawn[i : i + most] for i in range(0, len(drawn), most)]

    def mean(name: str, n: int) -> float:
        return best_of_mean([[(score, values[name]) for score, values in group] for group in rows], n)

    names = ("gold", "score", "response_length", "eos_rate")
    return [
        {"n": n, "kl": best_of_kl(n), **{name: mean(name, n) for name in names}} for n in powers_up_to(most)
    ]


def accuracy_by_gap(
    margins: Sequence[float], preferences: Sequence[Preference]
) -> dict[str, dict[str, float]]:
    """How often the reward model orders held-out pairs as the gold score does, by the gap between gold
    scores.

    Args:
        margins: score of the chosen answer of each pair minus that of the rejected one.
    """
    rows: list[tuple[float, bool]] = []
    for item, margin in zip(preferences, margins, strict=True):
        post = facts_of(item.prompt)
        chosen = gold_score(post, item.chosen, item.chosen_ended)
        gap = chosen - gold_score(post, item.rejected, item.rejected_ended)
        if gap:
            rows.append((abs(gap), (gap > 0) == (margin > 0)))
    table = {}
    for low, high in [*pairwise(GAPS), (0.2, 1.01)]:
        inside = [right for gap, right in rows if low <= gap < high]
        name = f"{low:g} or more" if (low, high) == (0.2, 1.01) else f"{low:g} to {min(high, 1):g}"
        table[name] = {"pairs": len(inside), "accuracy": sum(inside) / max(len(inside), 1)}
    return table
