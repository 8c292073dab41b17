"""Chat-template markup read back into turns, for pages and terminals: the marks of each family of templates.
In: a prompt, perhaps with the turns that were kept of it. Out: its turns, without the markup of a chat
template.

A prompt that was made of messages carries its turns (`proxima.core.types.Prompt`). Text alone is read back
only where all of it is the markup of a known family of templates; any other text has no turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TypedDict

from proxima.core.json_record import Record

MOST, LONGEST = 20, 4000  # turns of a conversation that is shown, and characters of one
SYSTEM = 120  # characters of a system turn in a terminal


ASSISTANT, ENVIRONMENT = "assistant", "environment"  # the policy, and what answers it in an episode


class Turn(TypedDict):
    """Who says what."""

    role: str
    text: str


def turns_of(prompt: str, kept: object = None) -> list[Turn]:
    """The turns of a prompt; none where it is plain text.

    Args:
        kept: what a file has kept of them; anything other than turns is ignored.
    """
    return checked_turns(kept) or list(getattr(prompt, "turns", ())) or read_turns(prompt)


def with_turns(record: Record) -> Record:
    """A record to write down, with the turns that its prompt carries."""
    turns = getattr(record["prompt"], "turns", ())
    return {**record, "turns": list(turns)} if turns else record


def episode_turns(tokens: Sequence[str], chosen: Sequence[bool]) -> list[Turn]:
    """The turns of a response: the policy chose some of its tokens and read others. Empty where it chose
    all."""
    runs = groupby(zip(tokens, chosen, strict=True), lambda pair: pair[1])
    turns = [
        Turn(role=ASSISTANT if own else ENVIRONMENT, text="".join(token for token, _ in run))
        for own, run in runs
    ]
    return [] if all(chosen) else turns


def message_turns(messages: Sequence[Mapping[str, object]], rendered: str = "") -> list[Turn]:
    """The turns of messages.

    Args:
        rendered: what a template made of them; a turn that it adds in front (a system prompt of its own) is
            shown where the text can be read back.
    """
    own = [Turn(role=str(message["role"]), text=_content(message)) for message in messages]
    read = read_turns(rendered)
    same = [turn["text"] for turn in read[-len(own) :]] == [turn["text"].strip() for turn in own]
    return read if same and len(read) > len(own) else own


def _content(message: Mapping[str, object]) -> str:
    """A message without content calls tools."""
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(message.get("tool_calls"), ensure_ascii=False)


def checked_turns(value: object) -> list[Turn]:
    """Turns as a file holds them; none where it holds anything else."""
    if not isinstance(value, list):
        return []
    turns = [
        Turn(role=each["role"], text=each["text"])
        for each in value
        if isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("text"), str)
    ]
    return turns if len(turns) == len(value) else []


def cut_turns(turns: Sequence[Turn], longest: int = LONGEST, most: int = MOST) -> list[Turn]:
    """The last turns, each of bounded length."""
    shown = [
        Turn(role=cut_text(turn["role"], 40), text=cut_text(turn["text"], longest)) for turn in turns[-most:]
    ]
    earlier = len(turns) - len(shown)
    note = Turn(role="", text=f"… {earlier} earlier turns")
    return [note, *shown] if earlier else shown


def cut_text(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"


def in_lines(prompt: str, kept: object = None) -> str:
    """A prompt for a terminal: one turn under the other, a long system prompt cut; plain text as it is."""
    turns = turns_of(prompt, kept)
    return "\n".join(map(turn_line, turns)) if turns else prompt


def turn_line(turn: Turn) -> str:
    """`role: text`; what follows its first line is indented, so that no text passes for another turn."""
    text = turn["text"].strip()
    if turn["role"] == "system":
        text = cut_text(" ".join(text.split()), SYSTEM)
    return f"{turn['role']}: {text}".replace("\n", "\n  ")


# --- markup ---

FAMILIES = (  # how a turn begins, and how it ends
    (r"<\|im_start\|>(\w+)\n", r"<\|im_end\|>\n?"),  # ChatML: Qwen, SmolLM
    (r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n", r"<\|eot_id\|>"),  # Llama 3
    (r"<start_of_turn>(\w+)\n", r"<end_of_turn>\n?"),  # Gemma
    (r"<\|(system|user|assistant)\|>\n", r"(?:</s>|<\|end\|>|<\|endoftext\|>)\n?"),  # Zephyr, Phi
)
BEGINNINGS = ("<|begin_of_text|>", "<bos>", "<s>")  # which a template may write itself
ANSWERERS = {"assistant", "model"}
MARKS = tuple((re.compile(begin), re.compile(end)) for begin, end in FAMILIES)
SYSTEM_PROMPT = re.compile(r"\[SYSTEM_PROMPT\](.*?)\[/SYSTEM_PROMPT\]", re.DOTALL)
LLAMA_SYSTEM = re.compile(r"\s*<<SYS>>(.*?)<</SYS>>(.*)", re.DOTALL)


def read_turns(text: str) -> list[Turn]:
    """The turns of a text that is the markup of one family from its first to its last letter; else none."""
    for beginning in BEGINNINGS:
        text = text.removeprefix(beginning)
    for begin, end in MARKS:
        if turns := _read_marks(text, begin, end):
            return turns
    return _read_instructions(text)


def _read_marks(text: str, begin: re.Pattern[str], end: re.Pattern[str]) -> list[Turn]:
    """Turns between marks; only an answer that has just begun may lack its end."""
    turns: list[Turn] = []
    place = 0
    while place < len(text):
        opened = begin.match(text, place)
        if opened is None:
            return []
        closed = end.search(text, opened.end())
        stop = closed.start() if closed else len(text)
        if begin.search(text, opened.end(), stop) or not (closed or opened[1] in ANSWERERS):
            return []
        turns.append(_turn(opened[1], text[opened.end() : stop]))
        place = closed.end() if closed else len(text)
    return turns[:-1] if turns and turns[-1] == _turn("assistant", "") else turns


def _read_instructions(text: str) -> list[Turn]:
    """[INST] of Mistral and Llama 2."""
    turns: list[Turn] = []
    if system := SYSTEM_PROMPT.match(text):
        turns.append(_turn("system", system[1]))
        text = text[system.end() :]
    before, *parts = text.split("[INST]")
    if before.strip() or any(part.count("[/INST]") != 1 for part in parts):
        return []
    for part in parts:
        user, answer = part.split("[/INST]")
        if system := LLAMA_SYSTEM.fullmatch(user):
            turns.append(_turn("system", system[1]))
            user = system[2]
        turns.append(_turn("user", user))
        if answer := answer.removesuffix("<s>").strip().removesuffix("</s>"):
            turns.append(_turn("assistant", answer))
    return turns if parts else []


def _turn(role: str, text: str) -> Turn:
    return Turn(role="assistant" if role in ANSWERERS else role, text=text.strip())
