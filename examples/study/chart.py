# python -m examples.study.chart runs/study
# not run: it draws what a study has judged, and there is none here
"""The study's chart: quality against KL, a point per method with 95 % intervals over seeds in both, seeds as
dots, wall-clock in the legend. In: what a study has judged. Out: an SVG file, which any browser shows.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from proxima.pages.comparison.seed_groups import t_interval

JUDGED = "study.json"  # in the folder of a finished run
WIDTH, HEIGHT = 960, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 600, 56, 420  # of the plot itself; the legend stands to its right
COLOURS = ("#2563a8", "#c2571a", "#2f7d4f", "#9b3d8f", "#8a6d1d", "#b3344a", "#3c6f78", "#6b5bb5", "#5d6670")
STYLE = (
    "text { font: 13px system-ui, sans-serif; fill: #1f2933 } .soft { fill: #5d6670 } "
    ".head { font-weight: 600 } .mark { font-size: 11px; font-weight: 600; fill: #fff } "
    ".grid { stroke: #e4e7eb } .axis { stroke: #9aa5b1 }"
)


class Measured(NamedTuple):
    """A method, one number per seed in each list."""

    method: str
    quality: list[float]
    kl: list[float]
    seconds: list[float]
    length: list[float]


def measured(folder: Path, methods: Sequence[str], seeds: Sequence[int]) -> list[Measured]:
    """Of the finished runs; methods without one are left out."""
    found = []
    for method in methods:
        files = [folder / f"seed-{seed}" / method / JUDGED for seed in seeds]
        judged = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
        columns = [[each[name] for each in judged] for name in ("gold", "kl", "seconds", "response_length")]
        if judged:
            found.append(Measured(method, *columns))
    return found


class Scale(NamedTuple):
    """From numbers to places in the picture."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, number: float) -> float:
        held = min(max(number, self.low), self.high)
        return self.start + (held - self.low) / (self.high - self.low) * (self.end - self.start)

    @classmethod
    def of(cls, numbers: Sequence[float], start: float, end: float) -> "Scale":
        low, high = min(numbers), max(numbers)
        room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
        return cls(low - room, high + room, start, end)

    def ticks(self) -> Iterator[float]:
        """Four to nine round numbers."""
        rough = (self.high - self.low) / 5
        size = 10.0 ** math.floor(math.log10(rough))
        size *= next(times for times in (1, 2, 5, 10) if times * size >= rough)
        place = math.ceil(self.low / size)
        while place * size <= self.high:
            yield place * size
            place += 1


def draw(rows: Sequence[Measured], quality: str) -> str:
    """The whole picture.

    Args:
        quality: what the methods are judged by, in words.
    """
    if not rows:
        raise ValueError("no run is finished, so there is nothing to draw")
    across, up = (
        Scale.of([*_ends(rows, take)], *ends)
        for take, ends in ((lambda r: r.kl, (LEFT, RIGHT)), (lambda r: r.quality, (BOTTOM, TOP)))
    )
    parts = [*_frame(across, up, quality), *_legend(rows, quality)]
    for number, row in enumerate(rows, 1):
        parts += _seeds(row, across, up, _colour(number))
    for number, row in enumerate(rows, 1):
        parts += _point(row, number, across, up)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">\n<title>{escape(quality)} against KL</title>\n'
        f'<style>{STYLE}</style>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _ends(rows: Sequence[Measured], take: Callable[[Measured], list[float]]) -> Iterator[float]:
    """What has to fit: every seed, and intervals up to twice the seeds' own range (two have wide ones)."""
    seeds = [number for row in rows for number in take(row)]
    room = max(seeds) - min(seeds)
    yield from seeds
    for row in rows:
        for end in t_interval(take(row))[1:]:
            if not math.isnan(end):
                yield min(max(end, min(seeds) - room), max(seeds) + room)


def _colour(number: int) -> str:
    return COLOURS[(number - 1) % len(COLOURS)]


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, more: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {more}/>'


def _frame(across: Scale, up: Scale, quality: str) -> list[str]:
    parts = [_text(LEFT, 28, f"{quality.capitalize()} against KL to the reference", 'class="head"')]
    for tick in up.ticks():
        parts.append(_line(LEFT, up(tick), RIGHT, up(tick), 'class="grid"'))
        parts.append(_text(LEFT - 8, up(tick) + 4, f"{tick:.4g}", 'class="soft" text-anchor="end"'))
    for tick in across.ticks():
        parts.append(_line(across(tick), TOP, across(tick), BOTTOM, 'class="grid"'))
        parts.append(_text(across(tick), BOTTOM + 20, f"{tick:.4g}", 'class="soft" text-anchor="middle"'))
    parts.append(_line(LEFT, BOTTOM, RIGHT, BOTTOM, 'class="axis"'))
    parts.append(_line(LEFT, TOP, LEFT, BOTTOM, 'class="axis"'))
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 44, "KL, nats per response", 'text-anchor="middle"'))
    parts.append(_text(LEFT - 8, TOP - 10, quality, 'class="soft" text-anchor="start"'))
    return parts


def _legend(rows: Sequence[Measured], quality: str) -> list[str]:
    left = RIGHT + 30
    parts = [
        _text(left + 24, TOP, "method", 'class="soft"'),
        _text(WIDTH - 130, TOP, quality, 'class="soft" text-anchor="end"'),
        _text(WIDTH - 78, TOP, "seeds", 'class="soft" text-anchor="end"'),
        _text(WIDTH - 16, TOP, "seconds", 'class="soft" text-anchor="end"'),
    ]
    for number, row in enumerate(rows, 1):
        y = TOP + 26 * number
        parts += _mark(left + 8, y - 4, number)
        parts.append(_text(left + 24, y, row.method))
        for x, shown in (
            (WIDTH - 130, f"{fmean(row.quality):.3f}"),
            (WIDTH - 78, str(len(row.quality))),
            (WIDTH - 16, f"{fmean(row.seconds):.0f}"),
        ):
            parts.append(_text(x, y, shown, 'text-anchor="end"'))
    y = TOP + 26 * (len(rows) + 1) + 6
    parts.append(_text(left, y, "bars: 95 % intervals over seeds; dots: seeds", 'class="soft"'))
    return parts


def _seeds(row: Measured, across: Scale, up: Scale, colour: str) -> list[str]:
    return [
        f'<circle cx="{across(kl):.1f}" cy="{up(quality):.1f}" r="2.5" fill="{colour}" opacity="0.45"/>'
        for kl, quality in zip(row.kl, row.quality, strict=True)
    ]


def _point(row: Measured, number: int, across: Scale, up: Scale) -> list[str]:
    x, y, more = across(fmean(row.kl)), up(fmean(row.quality)), f'stroke="{_colour(number)}" stroke-width="2"'
    (_, left, right), (_, low, high) = t_interval(row.kl), t_interval(row.quality)
    bars = []
    if not math.isnan(left):  # one seed has no interval
        bars = [_line(across(left), y, across(right), y, more), _line(x, up(low), x, up(high), more)]
    return [*bars, *_mark(x, y, number)]


def _mark(x: float, y: float, number: int) -> list[str]:
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="{_colour(number)}" stroke="#fff"/>',
        _text(x, y + 4, str(number), 'class="mark" text-anchor="middle"'),
    ]


def write_chart(folder: Path, methods: Sequence[str], seeds: Sequence[int], quality: str) -> Path:
    """The picture in the study's folder."""
    target = folder / "study.svg"
    target.write_text(draw(measured(folder, methods, seeds), quality), encoding="utf-8")
    return target


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw all finished runs of a study.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quality", default="gold score", help="what the methods were judged by, in words")
    given = parser.parse_args(arguments)
    finished = [path.parent for path in given.folder.glob(f"seed-*/*/{JUDGED}")]
    if not finished:
        parser.error(f"no finished run in {given.folder}")
    seeds = sorted({int(path.parent.name.removeprefix("seed-")) for path in finished})
    print(write_chart(given.folder, sorted({path.name for path in finished}), seeds, given.quality))


if __name__ == "__main__":
    main()
