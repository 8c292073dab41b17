"""Conversations written as text by the tokenizer's chat template. In: messages and a tokenizer with a chat
template. Out: a prompt, or a prompt and its answer.

prompt + answer is the template's own rendering, except for what the trainer adds itself: a BOS in front, an
EOS behind.
"""

from __future__ import annotations

from proxima.core.chat_turns import message_turns
from proxima.core.encoding import added_ids
from proxima.core.json_record import Record
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Prompt
from proxima.data.rows import BrokenData

Message = Record
Messages = list[Message]


class Skip(Exception):  # noqa: N818
    """This row is left out, and counted under this reason; the rest of the file is fine."""


class ChatTemplate:
    """Renders messages with the template of a model's tokenizer; without one it says what is missing when
    first used."""

    def __init__(self, tokenizer: Tokenizer | None = None, tools: list[Record] | None = None):
        """
        Args:
            tools: schemas of the tools that a prompt names.
        """
        self._tokenizer, self._tools = tokenizer, tools or None
        self._bos = ""
        if tokenizer is not None and (bos := getattr(tokenizer, "bos_token", None)):
            self._bos = bos if tokenizer.bos_token_id in added_ids(tokenizer).before else ""

    def prompt(self, messages: Messages) -> Prompt:
        """Everything before the answer, and what begins the answer."""
        text = self._render(messages, True)
        return Prompt(text, turns=message_turns(messages, text), messages=messages)

    def answer(self, messages: Messages, answer: Message) -> tuple[Prompt, str]:
        """The prompt, and the answer as the model has to write it."""
        prompt, whole = self.prompt(messages), self._render([*messages, answer], False)
        if not whole.startswith(prompt):
            raise BrokenData(
                "the chat template writes a prompt differently once it is answered, so where the answer "
                "begins cannot be told; "
                "give `prompt` and `completion` as texts"
            )
        return prompt, self._without_end(whole[len(prompt) :])

    def _without_end(self, text: str) -> str:
        """Without the EOS that the trainer adds, and the line break that follows it."""
        end = self._tokenizer.eos_token if self._tokenizer is not None else ""
        return text.rstrip().removesuffix(end) if end and text.rstrip().endswith(end) else text

    def _render(self, messages: Messages, asks: bool) -> str:
        if self._tokenizer is None:
            raise BrokenData(
                "conversations become text by a model's chat template; give the tokenizer, or texts"
            )
        if not self._tokenizer.chat_template:
            raise BrokenData(
                f"the tokenizer of {self._tokenizer.name_or_path!r} has no chat template, which "
                "conversations need; "
                "use a chat model's, or data with `prompt` as text"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=self._tools, tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # the template is a program that came with the model
            raise Skip(f"refused by the chat template ({error})") from None
        return text.removeprefix(self._bos)


def check_messages(value: object, column: str) -> Messages:
    """A list of {role, content} as the template reads it: keys that Arrow filled up with None are gone."""
    if not isinstance(value, list):
        raise BrokenData(f"`{column}` is a {type(value).__name__}, not a text or a list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BrokenData(
                f"`{column}` must be a list of {{role, content}}, got {str(message)[:60]!r} in it"
            )
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise BrokenData(
                f"`{column}` has a message of role {message['role']!r} whose content is not a text"
            )
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def until_last(messages: Messages, *roles: str) -> Messages:
    """The messages up to and including the last one of these roles; empty if there is none."""
    return messages[
        : max((i for i, message in enumerate(messages, 1) if message["role"] in roles), default=0)
    ]
