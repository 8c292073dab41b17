"""Prompts, demonstrations, preferences or ratings from a source. In: a file, a folder or a Hub id. Out: a
lazy Sequence of records of one kind.

Opening reads the source once, to find rows that cannot be used: these are left out, counted and said in one
warning. After that a record is read, and a conversation rendered, when it is asked for.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, overload

from tqdm import tqdm

from proxima.core.progress import no_bars
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Prompt
from proxima.data.chat_templates import ChatTemplate, Skip
from proxima.data.column_forms import (
    EMPTY_COMPLETION,
    EQUAL,
    Form,
    Side,
    carried_columns,
    demonstration_of,
    flag_of,
    forms_text,
    is_empty,
    margin_of,
    preference_of,
    prompt_of,
    rating_of,
    recognise,
)
from proxima.data.data_sources import open_rows
from proxima.data.records import AnyRecord, Demonstration, Preference, Rating
from proxima.data.rows import BrokenData, Row, Rows

Record = TypeVar("Record")
Convert = Callable[[Row, Form, ChatTemplate], Record]


@dataclass
class LeftOut:
    """Rows that a reason left out."""

    count: int
    first: str
    """Where the first of them stands."""


class Records(Sequence[Record], Generic[Record]):
    """Records of one kind, made from rows when asked for; a slice is again lazy."""

    def __init__(self, rows: Rows, form: Form, convert: Convert[Record], template: ChatTemplate):
        self.rows, self.form = rows, form
        self.left_out: dict[str, LeftOut] = {}
        self._convert, self._template = convert, template
        self._places = array("Q")
        for i, row in enumerate(
            tqdm(rows, desc=f"reading {rows.name}", unit="row", delay=2, leave=False, disable=no_bars())
        ):
            reason = self._reason(row, i)
            if reason is None:
                self._places.append(i)
            else:
                self.left_out.setdefault(reason, LeftOut(0, rows.where(i))).count += 1

    def _reason(self, row: Row, place: int) -> str | None:
        try:
            self._make(row, place)
        except Skip as skip:
            return str(skip)
        return None

    def _make(self, row: Row, place: int) -> Record:
        try:
            return self._convert(row, self.form, self._template)
        except BrokenData as error:
            raise BrokenData(f"{self.rows.where(place)}: {error}") from None

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Records[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Records[Record]:
        if isinstance(index, slice):
            part: Records[Record] = object.__new__(type(self))
            part.__dict__ = {**self.__dict__, "_places": self._places[index]}
            return part
        place = self._places[index]
        return self._make(self.rows.read(place), place)

    def summary(self) -> str:
        """What was left out, in one sentence."""
        here = f"{self.rows.name}, "
        reasons = [
            f"{item.count} with {why} (first: {item.first.removeprefix(here)})"
            for why, item in self.left_out.items()
        ]
        total = sum(item.count for item in self.left_out.values())
        return f"{self.rows.name}: {total} of {len(self.rows)} rows are left out: {'; '.join(reasons)}"


def rendered(prompt: Side, completion: Side, template: ChatTemplate) -> tuple[str, str]:
    """Prompt and answer as text."""
    if isinstance(prompt, str):
        return prompt, str(completion)
    if not completion:
        raise Skip(EMPTY_COMPLETION)
    if len(completion) != 1 or not isinstance(completion, list) or completion[0]["role"] != "assistant":
        raise BrokenData("a completion must be one message of the assistant")
    return template.answer(prompt, completion[0])


def to_prompt(row: Row, form: Form, template: ChatTemplate) -> Prompt:
    prompt = prompt_of(row, form)
    text = Prompt(prompt) if isinstance(prompt, str) else template.prompt(prompt)
    return Prompt(text, carried_columns(row), text.turns, text.messages)


def to_demonstration(row: Row, form: Form, template: ChatTemplate) -> Demonstration:
    prompt, completion = demonstration_of(row, form)
    if is_empty(completion) or (
        isinstance(completion, list) and not any(completion[0].get(k) for k in ("content", "tool_calls"))
    ):
        raise Skip(EMPTY_COMPLETION)
    return Demonstration(*rendered(prompt, completion, template))


def to_preference(row: Row, form: Form, template: ChatTemplate) -> Preference:
    prompt, chosen, rejected = preference_of(row, form)
    ended = flag_of(row, "chosen_ended"), flag_of(row, "rejected_ended")
    if chosen == rejected and ended[0] == ended[1]:
        raise Skip(EQUAL)
    text, better = rendered(prompt, chosen, template)
    worse = rendered(prompt, rejected, template)[1]
    return Preference(text, better, worse, *ended, margin_of(row), flag_of(row, "tie", absent=False))


def to_rating(row: Row, form: Form, template: ChatTemplate) -> Rating:
    return Rating(*rendered(*demonstration_of(row, form), template), rating_of(row), flag_of(row, "ended"))


KINDS: dict[str, Convert[AnyRecord]] = {
    "preferences": to_preference,
    "ratings": to_rating,
    "demonstrations": to_demonstration,
    "prompts": to_prompt,
}
"""How a row becomes a record, by the kind's name."""


def kinds_of(rows: Rows) -> dict[str, Form]:
    """The kinds of records that the first row's columns give, each with the form it is read by."""
    forms = recognise(rows[0])
    return {
        kind: next(form for form in forms if kind in form.gives)
        for kind in KINDS
        if any(kind in form.gives for form in forms)
    }


def read(
    source: str | Path | Rows, kind: str, convert: Convert[Record], tokenizer: Tokenizer | None, limit: int
) -> Records[Record]:
    """Records of a kind.

    A tokenizer with a chat template is needed only where the source holds conversations.
    """
    rows = open_rows(source, limit)
    form = kinds_of(rows).get(kind)
    if form is None:
        raise BrokenData(
            f"{rows.name} holds no {kind}: its columns are {', '.join(rows[0]) or 'none'}; "
            f"forms that are recognised: {forms_text()}"
        )
    records = Records(rows, form, convert, ChatTemplate(tokenizer))
    if not len(records):
        raise BrokenData(f"no {kind} can be used: {records.summary()}")
    if records.left_out:
        warnings.warn(records.summary(), stacklevel=3)
    return records


def read_prompts(
    source: str | Path | Rows, tokenizer: Tokenizer | None = None, limit: int = 0
) -> Records[Prompt]:
    """Prompts; each carries the other columns of its row."""
    return read(source, "prompts", to_prompt, tokenizer, limit)


def read_demonstrations(
    source: str | Path | Rows, tokenizer: Tokenizer | None = None, limit: int = 0
) -> Records[Demonstration]:
    return read(source, "demonstrations", to_demonstration, tokenizer, limit)


def read_preferences(
    source: str | Path | Rows, tokenizer: Tokenizer | None = None, limit: int = 0
) -> Records[Preference]:
    return read(source, "preferences", to_preference, tokenizer, limit)


def read_ratings(
    source: str | Path | Rows, tokenizer: Tokenizer | None = None, limit: int = 0
) -> Records[Rating]:
    return read(source, "ratings", to_rating, tokenizer, limit)
