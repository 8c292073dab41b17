"""Before the first step of a run, from the reference's answers: how texts end for classifiers that do not say
it, and the unit of reward models that bring none. The run keeps both from then on.

A value model that starts from such a reward model's head starts in its unit too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from proxima.core.types import Tokens
from proxima.models import ScoreUnit
from proxima.ppo_trainer.reward_computer import RewardComputer
from proxima.rewards import ENDING_SAMPLES, Samples

if TYPE_CHECKING:
    from proxima.ppo_trainer.ppo_trainer import PPOTrainer

log = logging.getLogger(__name__)

SAMPLES = 128  # answers that a unit is measured on
FIRST_STEP = -2  # whose noise they are sampled with; -1 is that of evaluations


def settle_endings(trainer: PPOTrainer, prompts: Sequence[str]) -> None:
    """Choose how texts end for each classifier that does not say it, before anything is scored with it."""
    computers = [trainer.reward_computer, *trainer.judges.scoring.values()]
    sources = [source for computer in computers for source in computer.classifiers.values()]
    if all(source.ending is not None for source in sources):
        return
    rollouts = reference_rollouts(trainer, prompts, ENDING_SAMPLES)
    samples = Samples.finished([Samples.of_tokens(tokens) for tokens in rollouts])
    for computer in computers:
        computer.settle(samples)


def measure_units(trainer: PPOTrainer, prompts: Sequence[str]) -> None:
    """Sample the reference on the first prompts, and give every reward model that lacks it a unit."""
    computer = trainer.reward_computer
    names = computer.lacking_units()
    if not names:
        return
    with _alone(computer, names):
        parts = [computer.score_tokens(tokens) for tokens in reference_rollouts(trainer, prompts, SAMPLES)]
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


def reference_rollouts(trainer: PPOTrainer, prompts: Sequence[str], answers: int) -> Iterator[Tokens]:
    """Answers of the reference, at least so many, in batches; where there are few prompts, the same ones get
    other noise."""
    size = min(len(prompts), trainer.config.batch_size, answers)
    per_round = len(prompts) // size
    for batch in range(-(-answers // size)):
        start = size * (batch % per_round)
        chosen = [prompts[i] for i in range(start, start + size)]
        yield trainer.generator.sample(chosen, FIRST_STEP - batch // per_round, reference=True)


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
