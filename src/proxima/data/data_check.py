"""`check`: what a source holds and what it is good for. In: a source, perhaps a tokenizer. Out: a
`DataReport`.

It reads the source twice: which rows can be used and as what, then their lengths. Of each row only a few
numbers are kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy
from numpy.typing import NDArray
from tqdm import tqdm

from proxima.core.chat_turns import message_turns
from proxima.core.encoding import encode_prompts
from proxima.core.progress import no_bars
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Prompt
from proxima.data.chat_templates import ChatTemplate, Message, Messages, Skip
from proxima.data.column_forms import Form, columns_of
from proxima.data.data_sources import open_rows
from proxima.data.read_records import KINDS, LeftOut, kinds_of
from proxima.data.records import AnyRecord, Preference, Rating
from proxima.data.rows import BrokenData, Row, Rows

AT_ONCE = 256  # records tokenised together
EXAMPLES = 3


@dataclass
class Lengths:
    """How long the texts of a field are."""

    name: str
    unit: str
    minimum: int
    median: int
    most: int
    """95 % are no longer."""
    maximum: int


@dataclass
class KindReport:
    """What a source gives of one kind of record."""

    form: Form
    columns: list[str]
    """Columns of the source that it is read from."""
    usable: int = 0
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    problem: str = ""
    """Why it cannot be read as this kind at all."""


@dataclass
class DataReport:
    """What `check` found.

    Lengths, duplicates and the like are those of `main`, the richest kind that can be used.
    """

    source: str
    columns: list[str] = field(default_factory=list)
    rows: int = 0
    kinds: dict[str, KindReport] = field(default_factory=dict)
    problem: str = ""
    """Why it cannot be read at all."""
    lengths: list[Lengths] = field(default_factory=list)
    context: int | None = None
    over_context: int = 0
    """Records longer, with their longest answer, than the model's context."""
    max_length: int = 0
    over_max_length: int = 0
    """Records longer than max_length, which `sft` and `reward` leave out."""
    duplicates: int = 0
    """Records that are the same, to the letter, as one before."""
    contradictions: int = 0
    """Records about the same prompt and answers with opposite preferences or different ratings."""
    empty_answers: int = 0
    """Answers without a letter; as one side of a preference, or rated, they are used."""
    plain: bool = False
    """Conversations were put together without a model's chat template."""
    examples: list[AnyRecord] = field(default_factory=list)

    @property
    def main(self) -> str:
        return next((kind for kind, report in self.kinds.items() if report.usable and not report.problem), "")

    @property
    def usable(self) -> bool:
        return bool(self.main) and not self.problem


def check(
    source: str | Path | Rows,
    tokenizer: Tokenizer | None = None,
    context: int | None = None,
    max_length: int = 0,
    limit: int = 0,
) -> DataReport:
    """Read a source and say what it is good for. Raises only where there is nothing to read.

    Args:
        tokenizer: measures lengths in tokens and renders conversations; without one, characters and words.
        context: most tokens the model can read.
        max_length: longest example in tokens that training takes.
        limit: look at only this many rows; 0 = all.
    """
    report = DataReport(str(source), context=context, max_length=max_length)
    template = PlainTemplate() if tokenizer is None else ChatTemplate(tokenizer)
    try:
        rows = open_rows(source, limit)
        report.source, report.columns = rows.name, list(rows[0])
        report.kinds = {
            kind: KindReport(form, columns_of(rows[0], kind, form)) for kind, form in kinds_of(rows).items()
        }
        for i, row in enumerate(rows):
            report.rows = i + 1
            for kind, found in report.kinds.items():
                if not found.problem:
                    count(kind, found, row, rows.where(i), template)
    except BrokenData as error:
        report.problem = str(error)
        return report
    if report.usable:
        measures = Measures(tokenizer)
        form = report.kinds[report.main].form
        for row in tqdm(rows, desc="measuring", unit="row", delay=2, leave=False, disable=no_bars()):
            with suppress(Skip):
                measures.add(KINDS[report.main](row, form, template))
        measures.write(report)
    report.plain = isinstance(template, PlainTemplate) and template.used
    return report


def count(kind: str, found: KindReport, row: Row, where: str, template: ChatTemplate) -> None:
    """Note what a row is as a record of this kind."""
    try:
        KINDS[kind](row, found.form, template)
        found.usable += 1
    except Skip as skip:
        found.left_out.setdefault(str(skip), LeftOut(0, where)).count += 1
    except BrokenData as error:
        found.problem = f"{where}: {error}"


class PlainTemplate(ChatTemplate):
    """Stands in where no model is given: role and content, one message after the other."""

    used = False

    def prompt(self, messages: Messages) -> Prompt:
        self.used = True
        said = "".join(f"{message['role']}: {message.get('content', '')}\n" for message in messages)
        return Prompt(f"{said}assistant: ", turns=message_turns(messages))

    def answer(self, messages: Messages, answer: Message) -> tuple[Prompt, str]:
        return self.prompt(messages), answer.get("content", "")


class Measures:
    """Numbers of the records of one kind."""

    def __init__(self, tokenizer: Tokenizer | None = None):
        self._tokenizer = tokenizer
        self._waiting: list[AnyRecord] = []
        self._lengths: dict[tuple[str, str], array[int]] = {}
        self._whole = array("Q")  # tokens of prompt and longest answer
        self._keys = array("Q")  # fingerprints of whole records
        self._topics = array("Q")  # fingerprints of what was judged
        self._labels = array("d")  # and how
        self._empty = 0
        self._examples: list[AnyRecord] = []

    def add(self, record: AnyRecord) -> None:
        fields = fields_of(record)
        answers = [text for name, text in fields.items() if name != "prompt"]
        self._keys.append(fingerprint(*fields.values(), *numbers_of(record)))
        self._empty += sum(not text.strip() for text in answers)
        if isinstance(record, Preference):
            self._topics.append(fingerprint(record.prompt, *sorted(answers)))
            self._labels.append(float(record.chosen < record.rejected))
        elif isinstance(record, Rating):
            self._topics.append(fingerprint(record.prompt, record.completion))
            self._labels.append(record.rating)
        if len(self._examples) < EXAMPLES:
            self._examples.append(record)
        self._waiting.append(record)
        if len(self._waiting) == AT_ONCE:
            self.measure()

    def measure(self) -> None:
        """Lengths of the records that wait."""
        records = [fields_of(record) for record in self._waiting]
        self._waiting = []
        for name in records[0] if records else ():
            texts = [record[name] for record in records]
            for unit, counts in self.count(texts, name == "prompt").items():
                self._lengths.setdefault((name, unit), array("Q")).extend(counts)
        if self._tokenizer is not None:
            self._add_whole()

    def _add_whole(self) -> None:
        """Tokens of each new record's prompt and its longest answer."""
        new = slice(len(self._whole), None)
        parts = {name: column[new] for (name, _), column in self._lengths.items()}
        prompts = parts.pop("prompt")
        answers = zip(*parts.values(), strict=True) if parts else ((0,) for _ in prompts)
        for prompt, lengths in zip(prompts, answers, strict=True):
            self._whole.append(prompt + max(lengths))

    def count(self, texts: Sequence[str], is_prompt: bool) -> dict[str, list[int]]:
        """Lengths of texts by unit; an answer's tokens include the EOS that training adds."""
        if self._tokenizer is None:
            return {
                "characters": [len(text) for text in texts],
                "words": [len(text.split()) for text in texts],
            }
        if is_prompt:
            return {"tokens": [len(row) for row in encode_prompts(self._tokenizer, texts)]}
        rows = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return {"tokens": [len(row) + 1 for row in rows]}

    def write(self, report: DataReport) -> None:
        self.measure()
        report.lengths = [summarise(name, unit, column) for (name, unit), column in self._lengths.items()]
        whole = numpy.array(self._whole)
        report.over_context = int((whole > report.context).sum()) if report.context else 0
        trained = report.main != "prompts" and report.max_length
        report.over_max_length = int((whole > report.max_length).sum()) if trained else 0
        report.duplicates = len(self._keys) - len(numpy.unique(numpy.array(self._keys)))
        report.contradictions = disagreements(numpy.array(self._topics), numpy.array(self._labels))
        report.empty_answers, report.examples = self._empty, self._examples


def fields_of(record: AnyRecord) -> dict[str, str]:
    """The texts of a record by name."""
    if isinstance(record, str):
        return {"prompt": record}
    return {name: value for name, value in vars(record).items() if isinstance(value, str)}


def numbers_of(record: AnyRecord) -> list[str]:
    """What else tells two records apart."""
    if isinstance(record, str):
        return []
    return [str(value) for value in vars(record).values() if not isinstance(value, str)]


def fingerprint(*texts: str) -> int:
    """64 bits of a hash."""
    digest = blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode() + b"\0")
    return int.from_bytes(digest.digest())


def summarise(name: str, unit: str, column: Sequence[int]) -> Lengths:
    values = numpy.array(column)
    middle, most = numpy.percentile(values, (50, 95), method="higher")
    return Lengths(name, unit, int(values.min()), int(middle), int(most), int(values.max()))


def disagreements(topics: NDArray[numpy.uint64], labels: NDArray[numpy.float64]) -> int:
    """Records whose topic was judged in more than one way."""
    if not len(topics):
        return 0
    _, groups = numpy.unique(topics, return_inverse=True)
    low = numpy.full(groups.max() + 1, numpy.inf)
    high = numpy.full(groups.max() + 1, -numpy.inf)
    numpy.minimum.at(low, groups, labels)
    numpy.maximum.at(high, groups, labels)
    return int((low < high)[groups].sum())
