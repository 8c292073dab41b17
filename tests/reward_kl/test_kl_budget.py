"""The KL budget on simulated policies: it reaches the target without much overshoot and stays there, whatever
the rewards' scale, the speed of learning, the noise, and how soon rewards saturate.

The policy is ref * exp(tilt * reward) with normal rewards, whose KL is tilt^2 / 2 in units of their spread; an
update moves the tilt by a bounded amount, as Adam does, towards more reward minus the penalty.
"""

import json
import math
import random

import pytest
import torch

from proxima.ppo_trainer import PPOTrainer
from proxima.reward_kl import KLBudget, adapt_kl_coef
from proxima.reward_kl.kl_budget import DELAY, RANGE, SHORTEST_LAG

TARGET = 4.0


def simulate(next_coef, coef, steps, rise, spread=1.0, saturation=0.0, batch=64, seed=0):
    """The true KL of every step.

    Args:
        next_coef: the controller: coefficient, measured KL -> coefficient.
        rise: steps in which a policy without penalty reaches the target.
        saturation: how soon further movement brings less reward and less KL; 0 = never, the normal case.
        batch: responses per step; a sequence KL is about as spread as it is large.
    """
    noise = random.Random(seed)
    tilt = momentum = 0.0
    speed = math.sqrt(2 * TARGET) / rise
    kls = []
    for _ in range(steps):
        kls.append(tilt**2 / 2 / (1 + saturation * tilt))
        gradient = 1 / (1 + saturation * tilt) - coef / spread * tilt
        momentum += (gradient - momentum) / 2
        tilt = max(0.0, tilt + speed * (momentum / math.hypot(momentum, 0.5) + noise.gauss(0, 0.1)))
        coef = next_coef(coef, max(0.0, kls[-1] * (1 + noise.gauss(0, 1) / math.sqrt(batch))))
        assert coef > 0
    return kls


def budget_run(steps, rise, spread=1.0, **plant):
    budget = KLBudget(TARGET)
    return simulate(budget.next_coef, budget.begin(spread), steps, rise, spread, **plant)


def mean(numbers):
    return sum(numbers) / len(numbers)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch", [8, 64, 512])
@pytest.mark.parametrize("rise", [10, 30, 100, 400])
def test_the_budget_is_reached_and_held_at_any_speed_of_learning(rise, batch, seed):
    kls = budget_run(12 * rise, rise, batch=batch, seed=seed)
    held = kls[4 * rise :]
    # 8 responses: a step's KL is a third too high or low, and 10 steps are hardly more than the delay
    assert max(kls) < (2.0 if batch == 8 else 1.5) * TARGET
    assert mean(held) == pytest.approx(TARGET, rel=0.1)
    assert min(held) > 0.5 * TARGET


@pytest.mark.parametrize("rise", [10, 100])
def test_rewards_that_saturate_need_another_coefficient_and_the_budget_finds_it(rise):
    """0.04 of the spread instead of the normal case's 0.35."""
    kls = budget_run(16 * rise, rise, saturation=0.5)
    assert max(kls) < 1.6 * TARGET  # 1.42: the coefficient must fall by a factor of ten, and stop in time
    assert mean(kls[10 * rise :]) == pytest.approx(TARGET, rel=0.1)


def test_the_scale_of_rewards_changes_nothing():
    runs = [budget_run(80, 20, spread=spread) for spread in (2.0**-10, 1.0, 2.0**10)]
    assert runs[0] == runs[1] == runs[2]  # powers of two: not even the rounding


def test_the_older_controller_misses_where_the_budget_holds():
    """Ziegler et al.'s, from 0.05 with a horizon of 400 responses, 64 per step."""

    def ziegler(coef, kl):
        return adapt_kl_coef(coef, kl, TARGET, 400, 64)

    for spread in (1.0, 10.0):
        assert max(simulate(ziegler, 0.05, 60, 10, spread)) > 5 * TARGET
        assert max(budget_run(60, 10, spread)) < 1.5 * TARGET


def test_after_a_jump_it_comes_back_and_nothing_had_wound_up():
    """A policy that cannot move (the learning rate is 0) for 500 steps, then can."""
    budget = KLBudget(TARGET)
    coef = budget.begin(1.0)
    for _ in range(500):
        coef = budget.next_coef(coef, 0.1)
    assert coef == budget.centre / RANGE  # the bound
    above = 0
    while coef < budget.centre / 10:
        coef = budget.next_coef(coef, 3 * TARGET)
        above += 1
    # log 10 at up to log 3 * gain / lag per step, and the proportional part at once: no 500 steps to unwind
    assert above < 2 * math.log(10) * (budget.lag + DELAY) / math.log(3)


def test_warm_up_and_failed_measurements_leave_it_alone():
    budget = KLBudget(TARGET)
    assert budget.next_coef(0.1, 3.0) == 0.1  # no spread yet
    coef = budget.begin(2.0)
    assert coef == 2.0 / math.sqrt(2 * TARGET) * math.exp(-SHORTEST_LAG / (SHORTEST_LAG + DELAY))
    before = budget.state()
    for unmeasured in (math.nan, math.inf):
        assert budget.next_coef(coef, unmeasured) == coef
        assert budget.state() == before


def test_its_state_survives_json_bit_exactly():
    noise = random.Random(1)
    whole, coef = KLBudget(TARGET), 0.0
    coef = whole.begin(0.7)
    for _ in range(30):
        other = KLBudget(TARGET)
        other.restore(json.loads(json.dumps(whole.state(), allow_nan=False)))
        kl = noise.uniform(0, 6)
        again = other.next_coef(coef, kl)
        coef = whole.next_coef(coef, kl)
        assert again == coef
        assert other == whole


@pytest.mark.parametrize("count", [3, 7])
def test_equal_rewards_begin_no_budget_whatever_their_rounding(make_config, count):
    """The deviation of 3 times 0.1 is 1e-17, not 0: a coefficient of that size would never hold anything."""
    trainer = PPOTrainer(make_config(kl_controller="budget", kl_target=TARGET, kl_coef=0.3))
    equal = torch.full((count,), 0.1, dtype=torch.float64)
    assert trainer._kl_coef(equal) == 0.3
    assert trainer._kl_coef(equal.unsqueeze(1).expand(-1, 3)) == 0.3
    equal[0] += 1e-3
    assert trainer._kl_coef(equal) == pytest.approx(
        float(equal.std(correction=0)) / math.sqrt(2 * TARGET) * math.exp(-KLBudget(TARGET).gain)
    )
