"""Defaults of reward training by rule. In: the model's size, what trains, the number of examples. Out: the
learning rate and the number of epochs.

Small models need, and bear, larger steps (`base_setup/learning_rates.py`) and more passes over few examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from proxima.base_setup import ADAPTER, ALL_WEIGHTS
from proxima.config import RewardConfig

SMALL = 5e7  # parameters up to which a model learns from more passes before it overfits


@dataclass(frozen=True)
class EpochRule:
    """How often training sees the data: until it has seen `examples`, within `most` epochs."""

    examples: int
    most: int

    def of(self, count: int) -> int:
        return min(self.most, math.ceil(self.examples / count))


SMALL_MODEL, MODEL = EpochRule(36_000, 4), EpochRule(20_000, 3)


def with_defaults(config: RewardConfig, parameters: int, examples: int) -> RewardConfig:
    """The settings with what is left to the rules filled in.

    Args:
        parameters: of the whole network.
        examples: to train on.
    """
    rate = (ADAPTER if config.lora_r else ALL_WEIGHTS).of(parameters)
    epochs = (SMALL_MODEL if parameters <= SMALL else MODEL).of(examples)
    return replace(config, learning_rate=config.learning_rate or rate, epochs=config.epochs or epochs)
