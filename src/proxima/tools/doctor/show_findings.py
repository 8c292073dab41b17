"""Findings as a table in the terminal, or as plain text where there is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxima.core.terminal_text import visible
from proxima.tools.doctor.finding import Finding

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def show(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print the table and a summary line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=128)
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    grid.add_column("")
    grid.add_column("check", max_width=24, overflow="fold")
    grid.add_column("finding", ratio=3, overflow="fold")
    grid.add_column("what to do", ratio=2, overflow="fold")
    for item in findings:
        cells = (Text(visible(text)) for text in (item.name, item.text, item.advice))
        grid.add_row(Text(item.level, style=STYLES[item.level]), *cells)
    console.print(grid)
    console.print(f"\n{summary(findings)}")


def summary(findings: Sequence[Finding]) -> str:
    counts = {level: sum(item.level == level for item in findings) for level in STYLES}
    warnings = f"{counts['warn']} warning{'' if counts['warn'] == 1 else 's'}"
    if counts["fail"]:
        return (
            f"{counts['fail']} of {len(findings)} checks found something that would spoil the run; {warnings}"
        )
    return f"{len(findings)} checks found nothing that would spoil the run; {warnings}"
