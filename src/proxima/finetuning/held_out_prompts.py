"""Which prompts of preferences and ratings are held out. In: the prompt of each example, in a shuffled order.
Out: the keys of whole prompts: another answer to a prompt that was trained on would be no evidence.

Of training that continues, the prompts that were held out before still are, and of the others only new ones:
the weights that it starts from have learned the rest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence

LARGEST = 4  # times as many examples as wanted, or half of all: with a prompt that adds more, too many


def prompt_key(prompt: str) -> int:
    """A number by which a prompt is known again, in any process."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big")


def hold_out(
    keys: Sequence[int], order: Sequence[int], wanted: int, new: int, before: Collection[int] = ()
) -> set[int]:
    """Keys of the prompts that are held out; none where each has too many examples.

    Args:
        keys: of the prompt of each example.
        order: places of all examples, shuffled.
        wanted: how many of the new examples.
        new: how many examples are new, the first.
        before: keys of prompts that were held out before.
    """
    sizes = Counter(keys)
    held_out = {key for key in before if key in sizes}
    settled = {*keys[new:], *held_out}
    most, count = max(wanted, min(LARGEST * wanted, new // 2)), 0
    for key in (keys[place] for place in order):
        if count < wanted and key not in settled and count + sizes[key] <= most:
            settled.add(key)
            held_out.add(key)
            count += sizes[key]
    return held_out
