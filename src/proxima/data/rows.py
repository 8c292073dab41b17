"""Rows of a source, read when asked for. In: lists, or several sources. Out: dicts, and where each stands."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import overload

Row = dict[str, object]


class BrokenData(ValueError):  # noqa: N818
    """What stands in a source cannot be read; the message names file and line."""


class Rows(Sequence[Row]):
    """A source's rows; only what is asked for is in memory. `rows[2:5]` is a list of rows."""

    name: str
    """The source, as messages call it."""

    @abstractmethod
    def read(self, index: int) -> Row:
        """The row at `index`, 0 <= index < len."""

    def where(self, index: int) -> str:
        """File and line, or source and row, of a row."""
        return f"{self.name}, row {index + 1}"

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self.read(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.name}")
        return self.read(index % len(self))


class ListRows(Rows):
    """Rows that are in memory, or in an Arrow file that is mapped into it (a `datasets.Dataset`)."""

    def __init__(self, rows: Sequence[Row], name: str):
        self._rows, self.name = rows, name

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def read(self, index: int) -> Row:
        return self._rows[index]


class JoinedRows(Rows):
    """Several files, one after the other."""

    def __init__(self, parts: Sequence[Rows], name: str):
        self._parts, self.name = parts, name
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[Row]:
        return (row for part in self._parts for row in part)

    def _place(self, index: int) -> tuple[Rows, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)

    def read(self, index: int) -> Row:
        part, place = self._place(index)
        return part.read(place)

    def where(self, index: int) -> str:
        part, place = self._place(index)
        return part.where(place)
