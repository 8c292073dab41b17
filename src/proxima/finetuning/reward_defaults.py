"""Defaults of reward training by rule. In: the model's size, what trains, the number of examples. Out: the
learning rate and the number of epochs.

    learning rate = at_600m * (6e8 / parameters) ** power, within bounds

A LoRA adapter trains with 1e-4 on a model of 0.6 B parameters and with 1.8e-3 on one of 1 M; all weights with
1e-5 and 9e-4. Small models need, and bear, larger steps and more passes over few examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from proxima.config import RewardConfig

PARAMETERS = 6e8  # of the model that the rates at 600 M are for
SMALL = 5e7  # parameters up to which a model learns from more passes before it overfits


@dataclass(frozen=True)
class RateRule:
    """A learning rate as a power of the model's size."""

    at_600m: float
    power: float
    least: float
    most: float

    def of(self, parameters: int) -> float:
        rate = self.at_600m * (PARAMETERS / parameters) ** self.power
        return float(f"{min(max(rate, self.least), self.most):.1e}")


@dataclass(frozen=True)
class EpochRule:
    """How often training sees the data: until it has seen `examples`, within `most` epochs."""

    examples: int
    most: int

    def of(self, count: int) -> int:
        return min(self.most, math.ceil(self.examples / count))


SMALL_MODEL, MODEL = EpochRule(36_000, 4), EpochRule(20_000, 3)
ADAPTER = RateRule(1e-4, 0.45, 2e-5, 2e-3)
ALL_WEIGHTS = RateRule(1e-5, 0.7, 2e-6, 1e-3)


def with_defaults(config: RewardConfig, parameters: int, examples: int) -> RewardConfig:
    """The settings with what is left to the rules filled in.

    Args:
        parameters: of the whole network.
        examples: to train on.
    """
    rate = (ADAPTER if config.lora_r else ALL_WEIGHTS).of(parameters)
    epochs = (SMALL_MODEL if parameters <= SMALL else MODEL).of(examples)
    return replace(config, learning_rate=config.learning_rate or rate, epochs=config.epochs or epochs)
