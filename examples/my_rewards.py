# proxima train --model-name embedded --data examples/prompts.jsonl --rewards examples.my_rewards:mentions
# --run-name mentions
"""Rewards of one's own.

In: prompts, completions and what else they name. Out: a number a completion, or one a token.
"""


def brevity(prompts, completions):
    return [-len(text) / 100 for text in completions]


def mentions(prompts, completions, answer):
    """1 where the completion holds the text in the data's column `answer`."""
    return [float(wanted in text) for wanted, text in zip(answer, completions, strict=True)]


def no_stutter(prompts, completions, completion_ids, cost: float = 0.1):
    """Rewards a token: minus `cost` on each token that is the same as the one before it."""
    return [
        [-cost * (at > 0 and ids[at - 1] == token) for at, token in enumerate(ids)] for ids in completion_ids
    ]
