# python examples/guessing_game.py 3
"""A game of two turns: find one of three words, with a hint after the first guess (40 steps teach it)."""

import random
import sys

from proxima import PPOConfig, Step

WORDS = ["is", "do", "should"]  # likely ones, so that the small model tries them; fixed guesses win 2 of 3


class GuessingGame:
    def reset(self, seed):
        self.word = random.Random(seed).choice(WORDS)

    def step(self, text):
        guess = text.strip()
        if guess == self.word:
            return Step(reward=1.0, done=True)
        if guess not in WORDS:
            return Step(" no,", reward=-0.1)
        return Step(" right," if WORDS.index(guess) < WORDS.index(self.word) else " left,")


def train(steps, **settings):
    """The share of games won, step by step."""
    from proxima import PPOTrainer  # here, because a process that plays the game needs no torch

    game = {"max_turns": 2, "max_new_tokens": 1, "gamma": 1.0, "discount": "turn", "top_k": 0, "top_p": 1.0}
    rates = {"learning_rate": 5e-4, "value_learning_rate": 3e-3, "entropy_coef": 0.03, "kl_coef": 0.0}
    size = {"minibatch_size": 32, "ppo_epochs": 2}
    config = PPOConfig("embedded", environment=GuessingGame, **game, **rates, **size, **settings)
    trainer, won = PPOTrainer(config), []
    for _ in range(steps):
        results = trainer.ppo_step(["TL;DR: i feel"] * 64)
        won.append(sum(reward > 0.5 for reward in results["rewards"]) / 64)
        print(f"step {trainer.step}: won {won[-1]:.2f}, for example {results['generated_texts'][0]!r}")
    return won


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
