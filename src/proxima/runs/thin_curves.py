"""Long curves thinned for drawing. In: xs and ys. Out: fewer points, with every peak and dip."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = list[float | None]


def thin(xs: Sequence[float], ys: Sequence[float], points: int = 1000) -> list[Point]:
    """[x, y] pairs, at most about `points` of them: the lowest and the highest of each part, the first and
    the last.

    None stands for a y that is not finite. Long curves leave these out, except one in a part with no others.
    """
    if len(xs) <= points:
        return [[x, y if math.isfinite(y) else None] for x, y in zip(xs, ys, strict=True)]
    parts = max(points // 2, 1)
    kept: set[int] = {0, len(xs) - 1}
    for number in range(parts):
        start, end = number * len(xs) // parts, (number + 1) * len(xs) // parts
        finite = [i for i in range(start, end) if math.isfinite(ys[i])]
        kept |= {min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)} if finite else {start}
    return [[xs[i], ys[i] if math.isfinite(ys[i]) else None] for i in sorted(kept)]
