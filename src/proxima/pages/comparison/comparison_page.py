"""`proxima compare`: the HTML page and the terminal's table.

In: what `compare_runs` found. Out: one HTML file; lines of text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from proxima.core.json_record import RecordView
from proxima.core.terminal_text import visible
from proxima.pages.web import make_page, read_script, read_style

OWN = Path(__file__).parent / "static"


def write_page(path: Path, result: RecordView, names: Sequence[str]) -> Path:
    title = " and ".join(names) if len(names) < 4 else f"{len(names)} runs"
    body = (
        f'<header class="bar"><span class="brand">Proxima <span>comparison</span></span></header>\n'
        f'<main class="compare"><h1>{escape(title)}</h1>\n<section id="table"></section>\n<section '
        'id="wins"></section>\n'
        '<section id="charts"></section>\n<section id="texts"></section>\n<section '
        'id="problems"></section></main>'
    )
    script = read_script("dom.js", "chart.js", "turns.js", OWN / "compare.js")
    style = read_style("base.css", "chart.css", OWN / "compare.css")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            make_page(f"Proxima: {title}", body, script, style, {**result, "names": names}), encoding="utf-8"
        )
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}; choose another place with --out"
        ) from error
    return path


def lines(result: RecordView) -> list[str]:
    """The same for the terminal, short, without any character that could steer it."""
    rows = result["rows"]
    columns = {
        key: title for key, title in result["columns"].items() if any(row[key] is not None for row in rows)
    }
    cells = [[*columns.values()], *([_cell(row[key]) for key in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    shown = ["  ".join(_aligned(row, widths)) for row in cells]
    for judge, rows in result["win_rates"].items():
        shown += ["", f"Win rates by {judge}"]
        for row in rows:
            interval = f"95 %: {row['low']:.3f} to {row['high']:.3f}, {row['prompts']} prompts"
            told = f"{row['rate']:.3f}   ({interval})" if row["prompts"] else "no prompt could be judged"
            shown.append(f"  {row['ours']} over {row['theirs']}: {told}")
    shown += result["notes"]
    return [
        visible(line.rstrip())
        for line in [*shown, *(f"left out: {problem}" for problem in result["problems"])]
    ]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Names to the left, numbers to the right."""
    pairs = enumerate(zip(cells, widths, strict=True))
    return [cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in pairs]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        mean, low, high = value
        return f"{mean:.4g}" if math.isnan(low) else f"{mean:.4g} ({low:.4g} to {high:.4g})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
