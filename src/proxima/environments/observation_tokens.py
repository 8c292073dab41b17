"""Observations as token ids, tokenised once: what a chat template writes after the policy's turn.

A conversation of a question, an answer MARK and the observations is rendered; what follows the mark is the
observation, the end of the turn in front of it and the beginning of the next turn behind it. The history is
never rendered again, so what the policy wrote stays the ids that it sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxima.core.tokenizer import Tokenizer
from proxima.environments.step import Message

MARK = "proxima-mark-4e1b"
PROBE = "proxima-probe-9d27"


class ObservationTokens:
    """By the chat template of a tokenizer, or as plain text."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._shown: set[str] = set()  # roles that the template does not lose

    def check(self, role: str) -> None:
        """A ValueError where the template loses messages of this role."""
        if role in self._shown:
            return
        try:
            text = self._after_turn([{"role": role, "content": PROBE}])
        except Exception as error:  # the template is a program that came with the model
            text, why = "", f" ({' '.join(str(error).split())[:100]})"
        else:
            why = ""
        if PROBE not in text:
            remedy = "use a model whose template shows them"
            if role == "user":  # tools are named by the template: they need conversations
                remedy += ", or prompts as plain text"
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} loses messages of role {role!r}{why}, "
                f"in which observations stand; {remedy}"
            )
        self._shown.add(role)

    def ids(self, messages: Sequence[Message], turn: Sequence[int], is_chat: bool) -> list[int]:
        """What is read after a turn.

        Args:
            turn: the ids that the policy sampled; where the last of them is the template's end of the turn,
                it is not written twice.
        """
        if not is_chat:
            text = "".join(message["content"] for message in messages)
            return self._encoded(text)
        for role in sorted({message["role"] for message in messages} - self._shown):
            self.check(role)
        ids = self._encoded(self._after_turn(messages))
        return ids[1:] if ids and turn and ids[0] == turn[-1] else ids

    def _after_turn(self, messages: Sequence[Message]) -> str:
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        text: str = self.tokenizer.apply_chat_template(
            [*said, *messages], tokenize=False, add_generation_prompt=True
        )
        return text.partition(MARK)[2]

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids)
