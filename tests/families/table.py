"""The table of docs/families.md. In: outcomes of the sweep. Out: Markdown, and back."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import transformers

from tests.families.check import Outcome
from tools.wrap_prose import wrapped

PAGE = Path(__file__).parent.parent.parent / "docs" / "families.md"
BEGIN, END = "<!-- written by `python -m tests.families` -->", "<!-- end -->"


def render(outcomes: Sequence[Outcome]) -> str:
    """Counts, then one row per architecture."""
    counts = Counter(outcome.status for outcome in outcomes)
    paths = Counter(outcome.path for outcome in outcomes if outcome.path)
    kinds = Counter(outcome.sampling for outcome in outcomes if outcome.path == "reference")
    lines = [
        f"transformers {transformers.__version__} registers {len(outcomes)} causal language models: "
        f"{counts['passes']} pass "
        f"({paths['fast']} on the fast path, {paths['reference']} on the reference path: {kinds['padded']} "
        "padded, "
        f"{kinds['grouped']} grouped, {kinds['whole']} whole), {counts['refused']} are refused, "
        f"{counts['not built']} cannot "
        "be built here.",
        "",
        "| architecture | outcome | path | sampling | reason |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(outcomes, key=lambda outcome: outcome.family):
        lines.append(
            f"| {row.family} | {row.status} | {row.path} | {row.sampling} | {row.reason.replace('|', '/')} |"
        )
    return "\n".join(lines)


def read_table(text: str) -> dict[str, Outcome]:
    """The rows that `render` wrote, by architecture."""
    rows = [
        line.strip("| ").split(" |")
        for line in text.partition(BEGIN)[2].splitlines()
        if line.startswith("| ")
    ]
    cells = [[cell.strip() for cell in row] + [""] * (5 - len(row)) for row in rows[1:]]
    return {row[0]: Outcome(*row[:5]) for row in cells}


def write(outcomes: Sequence[Outcome]) -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(wrapped(f"{before}{BEGIN}\n\n{render(outcomes)}\n\n{END}{after}"), encoding="utf-8")
