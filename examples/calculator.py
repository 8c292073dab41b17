# python -m examples.calculator
# not run: it writes the questions of calculator.yaml, which needs a chat model and a GPU
"""A calculator as a tool, of which the chat template tells the model, and a reward for the right product."""

import json
import random
import re
from pathlib import Path


def multiply(left: int, right: int) -> int:
    """
    Multiplies two integers.

    Args:
        left: The first factor.
        right: The second factor.
    """
    return left * right


def right_answer(prompts, completions, answer):
    """1 where the last number of the last turn is the product; what the tool said does not count."""
    turns = [text.rpartition("</tool_response>")[2].replace(",", "") for text in completions]
    found = [re.findall(r"-?\d+", text) for text in turns]
    return [
        float(bool(numbers) and numbers[-1] == str(wanted))
        for numbers, wanted in zip(found, answer, strict=True)
    ]


def write(path: Path = Path("products.jsonl"), count: int = 2048) -> None:
    """Questions that are hard in the head: factors of three digits."""
    numbers, lines = random.Random(0), []
    for _ in range(count):
        left, right = numbers.randint(100, 999), numbers.randint(100, 999)
        messages = [
            {"role": "user", "content": f"What is {left} * {right}? Use the tool, then say the number."}
        ]
        lines.append(json.dumps({"messages": messages, "answer": left * right}))
    path.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write()
