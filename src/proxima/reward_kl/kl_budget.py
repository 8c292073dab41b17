"""`KLBudget`: steers the KL coefficient so that the policy reaches a KL of `target` nats and stays there.

In: the spread of the rewards once, then the exact sequence KL of every step. Out: the next coefficient.

A PI controller in velocity form on the log of the coefficient: it is never negative, and the coefficient is
the whole memory of past errors, so nothing winds up at a bound. With x = smoothed KL / target:

    error = x - 1 below the target, log x above
    coef <- coef * exp(gain * (error - last error + log x / lag)),  gain = lag / (lag + DELAY)

Where the numbers come from:
- the start. The optimum of E[reward] - coef * KL has the KL spread^2 / (2 coef^2) where the rewards under the
  reference are normal; so coef = spread / sqrt(2 target), whatever the rewards' scale. The proportional part
  adds to it as the KL rises from 0 to the target. Bounds are a factor of RANGE around it.
- the errors. KL against coefficient is a power law, so the integral part has log x, from LOWEST up; the
  proportional part must begin at a KL of 0.
- the gain. Lambda tuning for a first-order lag with dead time: the closed loop is as fast as the open one.
  d log KL / d log coef is between 0 and -2 (the normal case); with 1 the worst case still has a gain margin
  of pi / 4 * (lag + DELAY) / DELAY >= 2.3, as lag >= 2 * DELAY.
- DELAY. A coefficient acts on the next step's update, whose KL is seen one step later, smoothed over about
  1 / SMOOTHING steps.
- the lag. Measured while the KL rises for the first time, as it depends on learning rates and batches: the
  area between the curve and its peak, over the peak, is the mean residence time; the KL, quadratic in how far
  the policy moved, changes twice as fast. Until the KL reaches the target, or rises more slowly than linearly
  for DELAY steps, a KL below the target says only that the policy needs time: there is no integral part yet.
A policy whose rewards saturate needs less penalty than the normal case: it approaches the target from below,
over several lags. A budget is a limit, so this is the better side to err on.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

DELAY = 3.0  # steps
SHORTEST_LAG = 2 * DELAY
SMOOTHING = 1 / 3
RANGE = 100.0
LOWEST = -2.0
RISING = 2.0  # times its mean so far: below that, a KL has grown more slowly than linearly


@dataclass
class KLBudget:
    """All of its fields are its state."""

    target: float
    centre: float = 0.0  # coefficient of the normal case; 0 before a spread was measured
    kl: float = math.nan  # smoothed
    lag: float = SHORTEST_LAG
    rising: bool = True  # whether the lag is still being measured: over `steps`, with their sum and peak
    steps: int = 0
    total: float = 0.0
    peak: float = 0.0
    slow_steps: int = 0  # in a row

    @property
    def has_begun(self) -> bool:
        return self.centre > 0

    @property
    def gain(self) -> float:
        return self.lag / (self.lag + DELAY)

    def begin(self, spread: float) -> float:
        """The first coefficient.

        Args:
            spread: standard deviation of the rewards of a step; more than 0.
        """
        self.centre = spread / math.sqrt(2 * self.target)
        return self.centre * math.exp(-self.gain)

    def next_coef(self, coef: float, kl: float) -> float:
        """The coefficient after a step whose mean exact sequence KL was `kl`; a number that is not finite =
        nothing was measured."""
        if not math.isfinite(kl) or not self.has_begun:
            return coef
        last, self.kl = self.kl, kl if math.isnan(self.kl) else self.kl + SMOOTHING * (kl - self.kl)
        error = self._error(self.kl)
        change = 0.0 if math.isnan(last) else error - self._error(last)
        if self.rising:
            self._measure_lag()
        integral = 0.0 if self.rising else self._log_error() / self.lag
        moved = coef * math.exp(self.gain * (change + integral))
        return min(max(moved, self.centre / RANGE), self.centre * RANGE)

    def state(self) -> dict[str, float | None]:
        """Plain values; nan as None."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}

    def restore(self, state: dict[str, float | None]) -> None:
        """All but the target, which is the config's."""
        for name, value in state.items():
            if name != "target":
                setattr(self, name, math.nan if value is None else value)

    def _error(self, kl: float) -> float:
        share = max(kl, 0.0) / self.target
        return share - 1 if share < 1 else math.log(share)

    def _log_error(self) -> float:
        return max(math.log(self.kl / self.target), LOWEST) if self.kl > 0 else LOWEST

    def _measure_lag(self) -> None:
        self.steps += 1
        self.total += self.kl
        self.peak = max(self.peak, self.kl)
        if self.peak > 0:
            residence = self.steps - self.total / self.peak
            self.lag = max(SHORTEST_LAG, residence / 2)
        is_slow = self.kl * self.steps < RISING * self.total
        self.slow_steps = self.slow_steps + 1 if is_slow else 0
        self.rising = self.kl < self.target and self.slow_steps < DELAY
