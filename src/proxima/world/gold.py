"""The gold score of a summary: true quality in [0, 1], known only to the world.

    gold = max(0, covered / facts - 0.25 * invented) * brevity * ending

covered: facts of the post that the summary names. invented: values it names that are not facts of the post.
brevity: 1 up to 6 + 3 words per fact, falling to 0 at twice that. ending: 1 if it is finished (EOS) and ends
with . or ?, else 1/2.
"""

from __future__ import annotations

import re

from proxima.world.posts import Post
from proxima.world.words import SLOTS

_FINDERS = {
    slot: {value: re.compile(rf"(?<![\w']){re.escape(value)}(?![\w'])") for value in values}
    for slot, values in SLOTS.items()
}


def named_values(text: str) -> dict[str, set[str]]:
    """The values of each slot that a text names, as whole words."""
    return {
        slot: {value for value, finder in finders.items() if finder.search(text)}
        for slot, finders in _FINDERS.items()
    }


def gold_score(post: Post, summary: str, ended: bool = True) -> float:
    """
    Args:
        ended: whether it is finished (EOS) rather than cut off.
    """
    text = summary.strip().lower()
    named = named_values(text)
    covered = sum(value in named[slot] for slot, value in post.facts.items())
    invented = sum(len(values - {post.facts.get(slot)}) for slot, values in named.items())
    limit = 6 + 3 * len(post.facts)
    brevity = min(1.0, max(0.0, 2.0 - len(text.split()) / limit))
    ending = 1.0 if ended and text.endswith((".", "?")) else 0.5
    return max(0.0, covered / len(post.facts) - 0.25 * invented) * brevity * ending
