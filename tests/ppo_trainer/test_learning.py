"""The policy learns, and strays from the reference only as far as the coefficient allows.

How one run ends depends on its seed, and on rounding as on another seed: after a dozen steps a difference in
the last bit is another token, a few steps later every response is another. What is asserted is the mean over
seeds, far from what it is when PPO learns and from what it is when it does not.
"""

import statistics

import pytest

from proxima.config import PRESETS
from proxima.ppo_trainer import PPOTrainer

PROMPTS = [f"r/x number {i} TL;DR:" for i in range(24)]
SEEDS = range(3)
STEPS, LENGTH = 12, 6


def letters(prompts, texts):
    """Share of a to z, at first one token in ten: every batch has better and worse responses from the
    first step on."""
    return [sum("a" <= character <= "z" for character in text) / LENGTH for text in texts]


def learn(
    make_config, seed: int, kl_coef: float, prompts=PROMPTS, steps=STEPS, **more
) -> tuple[float, float]:
    """Gain in mean reward from the first step to the last three, and KL to the reference in those."""
    trainer = PPOTrainer(
        make_config(
            **{
                "rewards": (letters,),
                "learning_rate": 1e-2,
                "value_learning_rate": 1e-2,
                "kl_coef": kl_coef,
                "max_new_tokens": LENGTH,
                "top_k": 0,
                "top_p": 1.0,
                "ppo_epochs": 2,
                "minibatch_size": 12,
                "seed": seed,
                **more,
            }
        )
    )
    history = [trainer.ppo_step(prompts) for _ in range(steps)]
    reward, kl = (statistics.mean(step[name] for step in history[-3:]) for name in ("avg_reward", "kl_exact"))
    return reward - history[0]["avg_reward"], kl


def test_the_policy_learns_to_write_letters_and_kl_rises_only_as_the_coefficient_allows(make_config):
    """Of ten seeds the gain was 0.53 to 0.86, its mean 0.71; with PPO's sign flipped it is below 0 for
    every seed. With the penalty it was at most 0.08, and KL at most 7.4, against 18 to 34 without. The mean
    of three seeds has a standard error of 0.06 or less, so 0.4 is five of them below what was seen."""
    free = [learn(make_config, seed, kl_coef=0.0) for seed in SEEDS]
    held = [learn(make_config, seed, kl_coef=0.3) for seed in SEEDS]
    free_gain, free_kl = map(statistics.mean, zip(*free, strict=True))
    held_gain, held_kl = map(statistics.mean, zip(*held, strict=True))
    assert free_gain > 0.4
    assert held_gain < free_gain / 2
    assert held_kl < free_kl / 2


@pytest.mark.long  # seconds each; `make test-long` has them
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_learns(make_config, name):
    """As it is, learning rates by rule included, with as many responses per step. Of two seeds the gain was
    0.82 to 0.94 after 36 steps with `fast`, `sao` (whose policy trains in 26 of them) and `grpo`; `16gb` leaves
    the rates of this task."""
    values = PRESETS[name]
    more = {"value_learning_rate": 1e-4} if "adv_estimator" in values else {}
    prompts = PROMPTS[: len(PROMPTS) // values.get("num_generations", 1)]
    found = [learn(make_config, seed, 0.0, prompts, 36, **{**more, **values}) for seed in (0, 1)]
    assert statistics.mean(gain for gain, _ in found) > 0.4
