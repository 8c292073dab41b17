"""Conversations that are too long for a model's context, cut by whole messages.

In: a prompt that a chat template wrote. Out: one that fits, written by the same template. The oldest messages
go first; the system message, and the last user message with what follows it, stay. Where these alone are too
long, the last user message loses its beginning. No token of the template is ever cut. None where that cannot
be: the system message alone is too long, or another template wrote the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxima.core.chat_turns import turns_of
from proxima.core.encoding import encode_prompts
from proxima.core.json_record import Record
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Prompt
from proxima.data import ChatTemplate, Skip

STAYING = ("system", "developer")


def is_conversation(prompt: str, tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's chat template writes prompts like this one."""
    return bool(tokenizer.chat_template and turns_of(prompt))


def cut_conversation(
    prompt: str, room: int, tokenizer: Tokenizer, tools: Sequence[Record] = ()
) -> Prompt | None:
    """The conversation in at most `room` tokens; None where that cannot be.

    Args:
        tools: that the prompt may name.
    """
    messages: list[Record] = list(getattr(prompt, "messages", ()))
    messages = messages or [{"role": turn["role"], "content": turn["text"]} for turn in turns_of(prompt)]
    template = _template_of(prompt, messages, tokenizer, tools)
    if template is None:
        return None
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    last = users[-1] if users else len(messages) - 1
    head = next((place for place, each in enumerate(messages) if each["role"] not in STAYING), last)

    def fitting(kept: list[Record]) -> Prompt | None:
        try:
            made = template.prompt(kept)
        except Skip:  # the template refuses this one
            return None
        fits = len(encode_prompts(tokenizer, [made])[0]) <= room
        return Prompt(made, getattr(prompt, "columns", None), made.turns, kept) if fits else None

    for place in [*(place for place in users if head < place < last), last]:
        if found := fitting([*messages[:head], *messages[place:]]):
            return found
    text, ends = messages[last].get("content"), messages[last + 1 :]

    def with_end(characters: int) -> Prompt | None:
        message = {**messages[last], "content": str(text)[-characters:]}
        return fitting([*messages[:head], message, *ends])

    longest = _largest(lambda count: with_end(count) is not None, len(text) if isinstance(text, str) else 0)
    return with_end(longest) if longest else None


def _template_of(
    prompt: str, messages: list[Record], tokenizer: Tokenizer, tools: Sequence[Record]
) -> ChatTemplate | None:
    """The template as it wrote this prompt, with the tools or without; None where it was another."""
    for named in [list(tools), []] if tools else [[]]:
        template = ChatTemplate(tokenizer, named)
        try:
            if template.prompt(messages) == str(prompt):
                return template
        except Skip:
            continue
    return None


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number of characters that fits, where fewer fit too; 0 where not even one does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
