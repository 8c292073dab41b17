# python examples/replace_a_part.py
"""One component alone, then your own in its place.

State-action pairs read as plain dicts, one per token.
"""

from proxima import GAEAdvantage, PPOConfig, PPOTrainer
from proxima.data import read_prompts

pairs = [
    {"state": "Why?", "action": " because", "reward": 0.0, "value": 0.2},
    {"state": "Why? because", "action": ".", "reward": 1.0, "value": 0.6},
]
for pair in GAEAdvantage().compute_gae_advantages(pairs, gamma=1.0, lam=0.95):
    print(f"{pair['action']!r:10} advantage {pair['advantage']:.2f}")


class RewardLessValue:
    """An advantage of your own: a token's own reward minus its value, blind to what comes later."""

    def compute_gae_advantages(self, pairs, gamma, lam):
        return [{**pair, "advantage": pair["reward"] - pair["value"]} for pair in pairs]


trainer = PPOTrainer(PPOConfig("embedded", rewards=["length_band,low=4,high=12"], max_new_tokens=20))
trainer.gae_advantage = RewardLessValue()
results = trainer.ppo_step(read_prompts("examples/prompts.jsonl"))
print(
    f"one PPO step with it: mean reward {sum(results['rewards']) / len(results['rewards']):.2f}, loss "
    f"{results['policy_loss']:.4f}"
)
