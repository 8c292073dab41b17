# proxima train --model-name embedded --data examples/prompts.jsonl --rewards examples.my_rewards:mentions
# --run-name mentions
"""Your own rewards.

They take prompts, completions and any column that they name. They return one number per completion or token.
"""


def brevity(prompts, completions):
    return [-len(text) / 100 for text in completions]


def mentions(prompts, completions, answer):
    """1 if the completion contains the text in the data's column `answer`."""
    return [float(wanted in text) for wanted, text in zip(answer, completions, strict=True)]


def no_stutter(prompts, completions, completion_ids, cost: float = 0.1):
    """Per-token rewards: minus `cost` on each token that repeats the previous one."""
    return [
        [-cost * (at > 0 and ids[at - 1] == token) for at, token in enumerate(ids)] for ids in completion_ids
    ]
