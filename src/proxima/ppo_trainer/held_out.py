"""Prompts that nothing is trained on. In: a trainer and prompts. Out: its answers, what they measure, a few by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from proxima.metrics import rollout_metrics, score_metrics
from proxima.ppo_trainer.reward_computer import Scores
from proxima.ppo_trainer.token_records import followed_records

if TYPE_CHECKING:
    from proxima.ppo_trainer.ppo_trainer import PPOTrainer

VALIDATION_STEP = -1  # its noise is a stream of its own, the same at every evaluation
SHOWN = ("kl", "kl_exact", "response_length", "eos_rate")


@dataclass(frozen=True)
class Answers:
    """One answer a prompt, and what they are worth."""

    texts: list[str]
    scores: list[float]  # nan where a reward failed
    measured: dict[str, float]  # by the names of the glossary
    records: list[dict[str, Any]]  # of the first few


def answer(trainer: PPOTrainer, prompts: Sequence[str], followed: int = 0) -> Answers:
    """Answers of the policy as it is now, in batches of the run's own size.

    Args:
        followed: answers, from the first on, whose every token is looked at.
    """
    texts: list[str] = []
    scored: list[Scores] = []
    records: list[dict[str, Any]] = []
    sums = dict.fromkeys(SHOWN, 0.0)
    for start in range(0, len(prompts), trainer.config.batch_size):
        batch = [prompts[i] for i in range(start, min(start + trainer.config.batch_size, len(prompts)))]
        pairs, written = trainer.generator.generate_sequences(batch, VALIDATION_STEP)
        texts += written
        scores = trainer.reward_computer.score_pairs(pairs)
        scored.append(scores)
        if few := min(followed - len(records), len(batch)):
            rows = torch.arange(few)
            records += followed_records(trainer, pairs.select(rows), scores.select(rows))
        measured = rollout_metrics(pairs)
        sums = {name: sums[name] + measured[name] * len(batch) / len(prompts) for name in SHOWN}
    total = torch.cat([item.total for item in scored])
    by_name = {name: torch.cat([item.by_name[name] for item in scored]) for name in scored[0].by_name}
    return Answers(texts, total.tolist(), {**score_metrics(total, by_name), **sums}, records)


class HeldOut:
    """Called at a verdict, it measures the held-out prompts; `records` are those of the last call."""

    def __init__(self, trainer: PPOTrainer, prompts: Sequence[str]):
        self.trainer, self.prompts = trainer, prompts
        self.records: list[dict[str, Any]] = []

    def __call__(self) -> dict[str, float]:
        """Where too many rewards fail, the reward is nan: no verdict."""
        config = self.trainer.config
        answers = answer(self.trainer, self.prompts, config.token_samples)
        self.records = answers.records
        failed = sum(map(math.isnan, answers.scores))
        too_many = failed > config.max_reward_failures * len(answers.scores)
        reward = math.nan if too_many else answers.measured["avg_reward"]
        return {"reward": reward, **{name: answers.measured[name] for name in ("kl", "response_length", "eos_rate")}}
