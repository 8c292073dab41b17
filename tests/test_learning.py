"""The policy learns, and strays from the reference only as far as the coefficient allows."""

import pytest

from proxima.ppo_trainer import PPOTrainer

PROMPTS = [f"r/x number {i} TL;DR:" for i in range(48)]


def letter_e(prompts, texts):
    return [text.count("e") / 6 for text in texts]


def run(make_config, kl_coef: float, steps: int = 25) -> tuple[float, float, float]:
    trainer = PPOTrainer(
        make_config(
            rewards=(letter_e,),
            learning_rate=1e-2,
            value_learning_rate=1e-2,
            kl_coef=kl_coef,
            max_new_tokens=6,
            top_k=0,
            top_p=1.0,
            ppo_epochs=2,
            minibatch_size=24,
            micro_batch_size=24,
            seed=1,
        )
    )
    history = [trainer.ppo_step(PROMPTS) for _ in range(steps)]
    last = history[-3:]
    return history[0]["avg_reward"], sum(x["avg_reward"] for x in last) / 3, sum(x["kl_exact"] for x in last) / 3


@pytest.mark.timeout(120)
def test_the_policy_learns_to_emit_a_token_and_kl_rises_only_as_the_coefficient_allows(make_config):
    first, free_reward, free_kl = run(make_config, kl_coef=0.0)
    _, held_reward, held_kl = run(make_config, kl_coef=0.3)
    assert first < 0.1
    assert free_reward > 0.8
    assert free_kl > 5
    assert held_kl < free_kl / 5
    assert held_reward < free_reward
