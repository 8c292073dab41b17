"""Before the first step of a run: the unit of reward models that bring none. In: training prompts. Out: mean
and deviation of their scores of the reference's answers, which the run keeps from then on.

A value model that starts from such a reward model's head starts in its unit too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from proxima.models import ScoreUnit
from proxima.ppo_trainer.reward_computer import RewardComputer, Scores

if TYPE_CHECKING:
    from proxima.ppo_trainer.ppo_trainer import PPOTrainer

log = logging.getLogger(__name__)

SAMPLES = 128  # answers that a unit is measured on
FIRST_STEP = -2  # whose noise they are sampled with; -1 is that of evaluations


def measure_units(trainer: PPOTrainer, prompts: Sequence[str]) -> None:
    """Sample the reference on the first prompts, and give every reward model that lacks it a unit."""
    computer = trainer.reward_computer
    names = computer.lacking_units()
    if not names:
        return
    with _alone(computer, names):
        parts = [_score(trainer, prompts, batch) for batch in range(-(-SAMPLES // _size(trainer, prompts)))]
    scores = {name: torch.cat([part.by_name[name] for part in parts])[:SAMPLES] for name in names}
    units = trainer.models.processes.on_main(lambda: {name: _unit(name, scores[name]) for name in names})
    for name, unit in units.items():
        computer.units[name] = ScoreUnit(*unit)
        log.info("reward %s: mean %g, deviation %g over %d answers", name, *unit, len(scores[name]))
        _rescale_value(trainer, name)


@contextmanager
def _alone(computer: RewardComputer, names: Sequence[str]) -> Iterator[None]:
    """Ask these rewards alone: others, which may be slow or cost money, have no unit."""
    kept = computer.rewards
    computer.rewards = [(spec, source) for spec, source in kept if spec.label in names]
    try:
        yield
    finally:
        computer.rewards = kept


def _unit(name: str, scores: torch.Tensor) -> list[float]:
    found = ScoreUnit.of(scores, f"reward {name!r}")
    return [found.mean, found.deviation]


def _size(trainer: PPOTrainer, prompts: Sequence[str]) -> int:
    return min(len(prompts), trainer.config.batch_size, SAMPLES)


def _score(trainer: PPOTrainer, prompts: Sequence[str], batch: int) -> Scores:
    """Scores of one batch of answers; where there are few prompts, the next batch has other noise."""
    size = _size(trainer, prompts)
    per_round = len(prompts) // size
    start = size * (batch % per_round)
    chosen = [prompts[i] for i in range(start, start + size)]
    tokens = trainer.generator.sample(chosen, FIRST_STEP - batch // per_round, reference=True)
    return trainer.reward_computer.score_tokens(tokens)


@torch.no_grad()
def _rescale_value(trainer: PPOTrainer, name: str) -> None:
    value, reward = trainer.models.value, trainer.models.reward
    source = next(str(spec.source) for spec in trainer.config.rewards if spec.label == name)
    starts_there = trainer.config.value_model == source or (
        trainer.config.value_model == "adapter" and reward.source == source
    )
    if value is None or value.head is None or not starts_there:
        return
    unit = trainer.reward_computer.units[name]
    value.head.weight /= unit.deviation
    value.head.bias.copy_(unit(value.head.bias))
