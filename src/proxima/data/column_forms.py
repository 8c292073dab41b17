r"""What columns mean: names and aliases of prompt, answer, preference and rating columns. In: a row. Out: its
prompt and answers, as text or messages; `FORMS` is the whole list.

A row that is merely bad (an empty prompt, a pair with equal sides) raises `Skip`; one that cannot be read
raises `BrokenData`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from os.path import commonprefix

from proxima.core.terminal_text import is_encodable
from proxima.data.chat_templates import Messages, Skip, check_messages, until_last
from proxima.data.rows import BrokenData, Row

Side = str | Messages
"""A prompt or an answer: a text, or messages that the chat template makes one of."""


@dataclass(frozen=True)
class Form:
    """A set of columns that is recognised."""

    name: str
    columns: tuple[str, ...]
    gives: tuple[str, ...]
    """Kinds of records, as the `read_*` functions are called."""


FORMS = (
    Form("preferences", ("prompt", "chosen", "rejected"), ("preferences", "prompts")),
    Form("transcripts", ("chosen", "rejected"), ("preferences", "prompts")),
    Form("ratings", ("prompt", "completion", "rating"), ("ratings", "demonstrations", "prompts")),
    Form("demonstrations", ("prompt", "completion"), ("demonstrations", "prompts")),
    Form("conversations", ("messages",), ("demonstrations", "prompts")),
    Form("prompts", ("prompt",), ("prompts",)),
)
"""The first form that gives a kind is the one it is read by.

Transcripts are whole ones, without a prompt of their own.
"""

ALIASES = {
    "prompt": ("prompt", "query", "question", "instruction"),
    "completion": ("completion", "response", "answer", "output"),
}
"""Other names of a column.

The first one is used where it is there; two of the others together are refused.
"""

COMMANDS = {
    "prompts": "train, generate",
    "demonstrations": "sft",
    "preferences": "reward",
    "ratings": "reward",
}
"""Which commands take a kind of record."""

ALPACA = (
    "Below is an instruction that describes a task{context}. Write a response that appropriately completes "
    "the request.\n\n"
    "### Instruction:\n{instruction}\n\n{given}### Response:\n"
)
"""What `instruction` (with or without `input`) becomes."""

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
EMPTY_PROMPT, EMPTY_COMPLETION, EQUAL = "an empty prompt", "an empty completion", "equal sides"
PART_EARLY = "sides that part before the last answer"
NO_COMMON = "sides without a common prompt"


def recognise(columns: Iterable[str]) -> tuple[Form, ...]:
    """The forms that these columns have."""
    names = {
        next((meaning for meaning, names in ALIASES.items() if column in names), column) for column in columns
    }
    found = [form for form in FORMS if names.issuperset(form.columns)]
    return tuple(form for form in found if form.name != "transcripts" or "prompt" not in names)


def forms_text() -> str:
    """All forms in one line, for messages."""
    return "; ".join(f"{form.name} ({', '.join(form.columns)})" for form in FORMS)


def column_of(row: Row, meaning: str) -> str:
    """The column of this row that is the prompt, or the completion."""
    first, *others = ALIASES[meaning]
    if first in row:
        return first
    found = [name for name in others if name in row]
    if not found:
        raise BrokenData(f"`{meaning}` is missing")
    if len(found) > 1:
        raise BrokenData(
            f"both `{found[0]}` and `{found[1]}` could be the {meaning}; name one of them `{meaning}`"
        )
    return found[0]


def columns_of(row: Row, kind: str, form: Form) -> list[str]:
    """The columns of this row that a record is made of, by their own names."""
    meanings = list(form.columns)
    if kind == "prompts" and "prompt" in meanings:
        meanings = ["prompt"]
    elif kind == "demonstrations" and "rating" in meanings:
        meanings.remove("rating")
    names = [
        next((name for name in ALIASES.get(meaning, ()) if name in row), meaning) for meaning in meanings
    ]
    return [*names, "input"] if "instruction" in names and "input" in row else names


def side(row: Row, column: str) -> Side:
    """A column as text or messages. What is absent is broken, what is null is empty."""
    if column not in row:
        raise BrokenData(f"`{column}` is missing")
    value = row[column]
    if value is None:
        return ""
    if not is_encodable(value):
        raise Skip("half of a surrogate pair in the text")
    return value if isinstance(value, str) else check_messages(value, column)


def own_prompt(row: Row) -> Side:
    """The prompt in a column of its own."""
    column = column_of(row, "prompt")
    prompt = side(row, column)
    if is_empty(prompt):
        raise Skip(EMPTY_PROMPT)
    if column == "instruction":
        given = side(row, "input") if "input" in row else ""
        if not isinstance(prompt, str) or not isinstance(given, str):
            raise BrokenData("`instruction` and `input` must be texts")
        context = ", paired with an input that provides further context" if given.strip() else ""
        given = f"### Input:\n{given}\n\n" if given.strip() else ""
        return ALPACA.format(context=context, instruction=prompt, given=given)
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise Skip("a prompt that ends on the assistant")
    return prompt


def is_empty(part: Side) -> bool:
    return not (part.strip() if isinstance(part, str) else part)


def prompt_of(row: Row, form: Form) -> Side:
    """The prompt of a row, the same that its demonstration or preference would have."""
    if form.name == "conversations":
        prompt: Side = until_last(as_messages(row, "messages"), "user")
    elif form.columns[-1] == "rejected":
        chosen, rejected = pair_sides(row)
        if isinstance(chosen, list) and isinstance(rejected, list) and isinstance(row.get("prompt", ""), str):
            prompt = until_last(common_messages(chosen, rejected), "user")
        elif form.name == "preferences":
            return own_prompt(row)
        else:
            prompt = common_transcript(str(chosen), str(rejected))
    else:
        return own_prompt(row)
    if is_empty(prompt):
        raise Skip(EMPTY_PROMPT)
    return prompt


def carried_columns(row: Row) -> Row:
    """What a prompt carries along: the row without the columns that are the prompt itself."""
    used = {next((name for name in ALIASES["prompt"] if name in row), "")}
    if "instruction" in used:
        used.add("input")
    return {name: value for name, value in row.items() if name not in used}


def demonstration_of(row: Row, form: Form) -> tuple[Side, Side]:
    """Prompt and completion; of a conversation, what leads to its last assistant message, and that
    message."""
    if form.name == "conversations":
        messages = until_last(as_messages(row, "messages"), "assistant")
        if not messages:
            raise Skip("a conversation without an assistant")
        prompt: Side = messages[:-1]
        completion: Side = messages[-1:]
    else:
        prompt, completion = own_prompt(row), side(row, column_of(row, "completion"))
        same_kind(prompt, completion, "prompt", "completion")
    if is_empty(prompt):
        raise Skip(EMPTY_PROMPT)
    return prompt, completion


def preference_of(row: Row, form: Form) -> tuple[Side, Side, Side]:
    """Prompt, chosen, rejected."""
    chosen, rejected = pair_sides(row)
    prompt: Side = "" if form.name == "transcripts" else own_prompt(row)
    if isinstance(chosen, list) and isinstance(rejected, list):
        if isinstance(prompt, str):
            if chosen == rejected:
                raise Skip(EQUAL)
            prompt = common_messages(chosen, rejected)
            if not prompt:
                raise Skip(NO_COMMON)
        chosen, rejected = (
            part[len(prompt) :] if part[: len(prompt)] == prompt else part for part in (chosen, rejected)
        )
        if any([message["role"] for message in part] != ["assistant"] for part in (chosen, rejected)):
            raise Skip(PART_EARLY)
    elif form.name == "transcripts":
        prompt = common_transcript(str(chosen), str(rejected))
        chosen, rejected = str(chosen)[len(prompt) :], str(rejected)[len(prompt) :]
        if chosen != rejected and any(
            turn in part for turn in (HUMAN, ASSISTANT) for part in (chosen, rejected)
        ):
            raise Skip(PART_EARLY)
    else:
        same_kind(prompt, chosen, "prompt", "chosen")
    return prompt, chosen, rejected


def pair_sides(row: Row) -> tuple[Side, Side]:
    chosen, rejected = side(row, "chosen"), side(row, "rejected")
    same_kind(chosen, rejected, "chosen", "rejected")
    return chosen, rejected


def same_kind(left: Side, right: Side, left_name: str, right_name: str) -> None:
    if isinstance(left, str) != isinstance(right, str):
        raise BrokenData(f"`{left_name}` and `{right_name}` must both be texts or both be lists of messages")


def as_messages(row: Row, column: str) -> Messages:
    value = side(row, column)
    return check_messages(value, column) if value else []


def common_messages(chosen: Messages, rejected: Messages) -> Messages:
    """The messages that both conversations begin with."""
    count = next(
        (i for i, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), None
    )
    return chosen[: min(len(chosen), len(rejected)) if count is None else count]


def common_transcript(chosen: str, rejected: str) -> str:
    """What both transcripts begin with, up to and including the last common assistant's turn mark."""
    place = commonprefix([chosen, rejected]).rfind(ASSISTANT)  # noqa: RUF071 (characters are meant)
    if place < 0:
        raise Skip(NO_COMMON)
    return chosen[: place + len(ASSISTANT)]


def rating_of(row: Row) -> float:
    if "rating" not in row:
        raise BrokenData("`rating` is missing")
    if row["rating"] in (None, ""):
        raise Skip("no rating")
    return _number_of(row, "rating")


def margin_of(row: Row) -> float:
    """By how much the chosen answer is better, where the data says it; 0 where it does not."""
    margin = 0.0 if row.get("margin") in (None, "") else _number_of(row, "margin")
    if margin < 0:
        raise Skip("a negative margin")
    return margin


def _number_of(row: Row, column: str) -> float:
    value = row[column]
    try:
        number = float("x" if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise BrokenData(f"`{column}` ({str(value)[:60]!r}) is not a number") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Skip(f"a {column} that is not finite")
    return number


def flag_of(row: Row, column: str, absent: bool = True) -> bool:
    """A truth value that need not be there; CSV holds it as a word."""
    value = row.get(column)
    if isinstance(value, str):
        value = {"true": True, "false": False, "": None}.get(value.lower(), value)
    if value is None:
        return absent
    if isinstance(value, bool):
        return value
    raise BrokenData(f"`{column}` ({value!r}) is neither true nor false")
