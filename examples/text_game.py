# python examples/text_game.py 3
"""A text game of five turns: walk to the treasure at one end of a corridor (20 steps teach it)."""

import random
import sys

from proxima import PPOConfig, Step


class Corridor:
    """Seven places, the walker in the middle. Words from a to m go left, those from n to z right."""

    def reset(self, seed):
        self.place, self.treasure = 0, random.Random(seed).choice([-3, 3])
        return f" treasure {self.side()},"

    def side(self):
        return "left" if self.treasure < self.place else "right"

    def step(self, text):
        word = text.strip().lower()
        if not word[:1].isalpha():
            return Step(f" that is no word, treasure {self.side()},", reward=-0.1)
        self.place += -1 if word[0] <= "m" else 1
        if self.place == self.treasure:
            return Step(reward=1.0, done=True)
        return Step(f" treasure {self.side()},")


def train(steps, **settings):
    """The share of games won, step by step; walking one way always wins half of them."""
    from proxima import PPOTrainer  # here, because a process that plays the game needs no torch

    game = {"environment": Corridor, "max_turns": 5, "max_new_tokens": 1, "gamma": 1.0, "discount": "turn"}
    rates = {"learning_rate": 5e-4, "value_learning_rate": 3e-3, "entropy_coef": 0.03, "kl_coef": 0.0}
    size = {"minibatch_size": 32, "ppo_epochs": 2, "top_k": 0, "top_p": 1.0}
    trainer, won = PPOTrainer(PPOConfig("embedded", **game, **rates, **size, **settings)), []
    for _ in range(steps):
        results = trainer.ppo_step(["POST: where is it?"] * 64)
        won.append(sum(reward > 0.5 for reward in results["rewards"]) / 64)
        print(f"step {trainer.step}: won {won[-1]:.2f}, for example {results['generated_texts'][0]!r}")
    return won


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
