"""Learning rates by rule, where nobody chose one. In: a model's size and what trains. Out: rates for AdamW.

    learning rate = at_600m * (6e8 / parameters) ** power, within bounds

Small models need, and bear, larger steps: an adapter of a reward or value model trains with 1e-4 on a model
of 0.6 B parameters and with 1.8e-3 on one of 1 M. The policy takes half of that, since its next rollout
follows from every step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from proxima.config import PPOConfig

log = logging.getLogger(__name__)

PARAMETERS = 6e8  # of the model that the rates at 600 M are for


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


ADAPTER = RateRule(1e-4, 0.45, 2e-5, 2e-3)
ALL_WEIGHTS = RateRule(1e-5, 0.7, 2e-6, 1e-3)
POLICY_ADAPTER = RateRule(5e-5, 0.45, 1e-5, 1e-3)
POLICY_WEIGHTS = RateRule(1e-6, 0.7, 2e-7, 1e-4)


def rates_by_size(config: PPOConfig, parameters: int) -> dict[str, float]:
    """The rates of the rules, by the setting's name, for what these settings train.

    Args:
        parameters: of the network without adapters.
    """
    policy, value = (POLICY_ADAPTER, ADAPTER) if config.lora_r else (POLICY_WEIGHTS, ALL_WEIGHTS)
    rates = {"learning_rate": policy.of(parameters)}
    return {**rates, "value_learning_rate": value.of(parameters)} if config.has_critic else rates


def fill_learning_rates(config: PPOConfig, parameters: int) -> None:
    """Replace learning rates of 0 by those of the rules."""
    rates = rates_by_size(config, parameters)
    filled = []
    if not config.learning_rate:
        config.learning_rate = rates["learning_rate"]
        filled.append(f"learning_rate {config.learning_rate:g}")
    if not config.value_learning_rate and config.has_critic:
        config.value_learning_rate = rates["value_learning_rate"]
        filled.append(f"value_learning_rate {config.value_learning_rate:g}")
    if filled:
        log.info("by the model's size, %d parameters: %s", parameters, ", ".join(filled))
