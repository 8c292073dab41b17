"""A `DataReport` for people. In: a report. Out: its text in the terminal, plain if there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxima.core.chat_turns import cut_turns, turns_of
from proxima.core.terminal_text import visible
from proxima.data.column_forms import ASSISTANT, COMMANDS, FORMS, HUMAN
from proxima.data.data_check import DataReport, fields_of
from proxima.data.records import Rating

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN = 150  # characters of an example's field


def show(report: DataReport, console: Console | None = None) -> None:
    """Print it."""
    from rich.console import Console
    from rich.text import Text

    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=128)
    console.print(Text(visible(report.source), style="bold"), f"  {report.rows} rows")
    if report.columns:
        console.print(Text(f"columns: {', '.join(visible(name) for name in report.columns)}"))
    if report.problem:
        console.print(Text(f"\nnot usable: {visible(report.problem)}", style="red"))
    elif not report.kinds:
        console.print(Text("\nnot usable: no form is recognised. These are:", style="red"))
        console.print(table(["form", "columns"], [[form.name, ", ".join(form.columns)] for form in FORMS]))
    else:
        details(report, console)


def details(report: DataReport, console: Console) -> None:
    """What the rows can be used as; then lengths, findings and examples of the richest kind."""
    from rich.text import Text

    console.print()
    show_kinds(report, console)
    if not report.usable:
        console.print(Text("\nnot usable: no row is left", style="red"))
        return
    console.print()
    show_lengths(report, console)
    console.print()
    for text, count in findings(report).items():
        console.print(Text(f"{count:>7}  {text}", style="yellow" if count else ""))
    show_examples(report, console)


def show_kinds(report: DataReport, console: Console) -> None:
    from rich.text import Text

    rows = [
        [f"as {kind}", str(found.usable), f"proxima {COMMANDS[kind]}", ", ".join(found.columns)]
        for kind, found in report.kinds.items()
        if not found.problem
    ]
    if rows:
        console.print(table(["usable", "rows", "by", "from"], rows, numbers=(1,)))
    for kind, found in report.kinds.items():
        if found.problem:
            console.print(Text(f"not as {kind}: {visible(found.problem)}", style="red"))
        for reason, item in found.left_out.items():
            where = item.first.removeprefix(f"{report.source}, ")
            line = f"left out as {kind}: {item.count} with {visible(reason)} (first: {visible(where)})"
            console.print(Text(line, style="yellow"))


def show_lengths(report: DataReport, console: Console) -> None:
    rows = [
        [f"{item.name}, {item.unit}", *map(str, (item.minimum, item.median, item.most, item.maximum))]
        for item in report.lengths
    ]
    header = [f"length ({report.main})", "min", "median", "95 %", "max"]
    console.print(table(header, rows, numbers=(1, 2, 3, 4)))
    if report.lengths[0].unit != "tokens":
        console.print("(give --model-name for lengths in tokens, against the model's context)")
    if report.plain:
        console.print(
            "(conversations are measured without a chat template; --model-name renders them as training will)"
        )


def show_examples(report: DataReport, console: Console) -> None:
    for number, example in enumerate(report.examples, 1):
        console.print(f"\nexample {number}")
        values = fields_of(example)
        if isinstance(example, Rating):
            values["rating"] = f"{example.rating:g}"
        prompt = values.pop("prompt")
        said = [(turn["role"], turn["text"], "") for turn in cut_turns(turns_of(prompt))]
        said = said or [("prompt", prompt, last_question(prompt))]
        said += [(name, text, "") for name, text in values.items()]
        console.print(table(None, [[f"  {visible(name)}", shorten(text, kept)] for name, text, kept in said]))


def last_question(prompt: str) -> str:
    """What the human says last in a transcript; empty in other prompts."""
    return prompt.rpartition(HUMAN)[2].removesuffix(ASSISTANT) if HUMAN in prompt else ""


def findings(report: DataReport) -> dict[str, int]:
    """What may be wrong, each with its number."""
    found = {"exact duplicates": report.duplicates}
    if report.main in ("preferences", "ratings"):
        judged = "opposite preferences" if report.main == "preferences" else "different ratings"
        found[f"contradictory: the same prompt and answers with {judged}"] = report.contradictions
        found["empty answers (used as they are)"] = report.empty_answers
    if report.context:
        found[f"longer than the model's context of {report.context} tokens"] = report.over_context
    if report.lengths[0].unit == "tokens" and report.max_length and report.main != "prompts":
        found[f"longer than max_length ({report.max_length} tokens): sft and reward leave them out"] = (
            report.over_max_length
        )
    return found


def table(header: list[str] | None, rows: list[list[str]], numbers: tuple[int, ...] = ()) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        box=None, show_header=header is not None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold"
    )
    for i in range(len(header or rows[0])):
        grid.add_column(
            header[i] if header else "", justify="right" if i in numbers else "left", overflow="fold"
        )
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


def shorten(text: str, kept: str = "") -> str:
    """Beginning and end, on one line, and where a long text has a part to be kept, that one too."""
    if len(text) <= SHOWN or not kept or kept not in text:
        return visible(ends_of(text, SHOWN))
    before, after = text.rsplit(kept, 1)
    return visible(ends_of(before, SHOWN // 2) + ends_of(kept, SHOWN) + ends_of(after, SHOWN // 2))


def ends_of(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length * 2 // 3]} … {text[-length // 3 :]}"
