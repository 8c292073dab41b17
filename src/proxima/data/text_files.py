"""Text files as rows. In: JSON lines, plain text, CSV, TSV (indexed by byte offset) or a JSON list (read
whole). Out: `Rows`.

Of an indexed file only two numbers per row stay in memory, so it may be larger than memory. A .gz file is
first unpacked into a temporary file, which is removed with the rows.
"""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import tempfile
import zlib
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO

from proxima.data.rows import BrokenData, ListRows, Row, Rows

BOM = b"\xef\xbb\xbf"
LONGEST_CELL = 2**31 - 1  # csv's own limit of 128 kB is too short for a post


class IndexedRows(Rows):
    """Rows that begin at known places of a file."""

    def __init__(self, path: Path, limit: int = 0):
        self.name = str(path)
        self._unpacked = unpack(path) if path.suffix == ".gz" else None
        self._path = Path(self._unpacked.name) if self._unpacked else path
        self._starts, self._lines = array("Q"), array("Q")
        with open(self._path, "rb") as file:
            file.seek(len(BOM) if file.read(len(BOM)) == BOM else 0)
            for start, line in self.find(file):
                self._starts.append(start)
                self._lines.append(line)
                if len(self._starts) == limit:
                    break

    @abstractmethod
    def find(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        """Offset and line number of each row."""

    @abstractmethod
    def parse(self, file: BinaryIO, line: int) -> Row:
        """The row that begins where the file stands."""

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Row]:
        with open(self._path, "rb") as file:
            for start, line in zip(self._starts, self._lines, strict=True):
                file.seek(start)
                yield self.parse(file, line)

    def read(self, index: int) -> Row:
        with open(self._path, "rb") as file:  # opened anew: threads and forked processes share no position
            file.seek(self._starts[index])
            return self.parse(file, self._lines[index])

    def where(self, index: int) -> str:
        return f"{self.name}, line {self._lines[index]}"

    def broken(self, line: int, problem: object) -> BrokenData:
        return BrokenData(f"{self.name}, line {line}: {problem}")

    def decode(self, content: bytes, line: int) -> str:
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self.broken(line, "not UTF-8 text") from None


class TextRows(IndexedRows):
    r"""One prompt per line; `\n` in it stands for a line break."""

    def find(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        start = file.tell()
        for line, content in enumerate(file, 1):
            if content.strip():
                yield start, line
            start += len(content)

    def parse(self, file: BinaryIO, line: int) -> Row:
        text = self.decode(file.readline(), line).removesuffix("\n").removesuffix("\r")
        return {"prompt": text.replace("\\n", "\n")}


class JsonRows(TextRows):
    """One JSON object per line."""

    def parse(self, file: BinaryIO, line: int) -> Row:
        text = self.decode(file.readline(), line)
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
            raise self.broken(line, f"not JSON ({error})") from None
        if not isinstance(row, dict):
            raise self.broken(line, f"a JSON {type(row).__name__}, not an object with columns")
        return row


class CsvRows(IndexedRows):
    """Comma- or tab-separated values; the first row names the columns.

    A quoted value may hold line breaks.
    """

    def __init__(self, path: Path, limit: int = 0, delimiter: str = ","):
        self._delimiter = delimiter
        self._columns: list[str] = []
        super().__init__(path, limit)

    def values(self, file: BinaryIO, line: int) -> Iterator[tuple[int, int, list[str]]]:
        """Offset, line number and values of each row from here on."""
        csv.field_size_limit(LONGEST_CELL)
        lines = (
            self.decode(content, number) for number, content in enumerate(iter(file.readline, b""), line)
        )
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        while True:
            start, first = file.tell(), line + reader.line_num
            try:
                found = next(reader, None)
            except csv.Error as error:
                raise self.broken(first, f"not {self.kind} ({error})") from None
            if found is None:
                return
            if found:
                yield start, first, found

    @property
    def kind(self) -> str:
        return "CSV" if self._delimiter == "," else "TSV"

    def find(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        rows = self.values(file, 1)
        _, line, self._columns = next(rows, (0, 0, []))
        if len(set(self._columns)) < len(self._columns):
            raise self.broken(line, f"a column is named twice ({', '.join(self._columns)})")
        if len(self._columns) == 1 and (others := [mark for mark in ",;\t" if mark in self._columns[0]]):
            raise self.broken(
                line,
                f"only one column, {self._columns[0]!r}: {self.kind} has no {others[0]!r} between values",
            )
        for start, line, found in rows:
            if len(found) != len(self._columns):
                hint = (
                    f"; a value that holds {self._delimiter!r} needs quotes"
                    if len(found) > len(self._columns)
                    else ""
                )
                raise self.broken(line, f"{len(found)} values for {len(self._columns)} columns{hint}")
            yield start, line

    def parse(self, file: BinaryIO, line: int) -> Row:
        _, _, found = next(self.values(file, line))
        return dict(zip(self._columns, found, strict=True))


def read_json(path: Path, limit: int = 0) -> Rows:
    """A JSON list of objects, read whole; a file that does not begin with `[` is read as lines of JSON."""
    opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            if file.read(1024).lstrip()[:1] != "[":
                return JsonRows(path, limit)
            file.seek(0)
            rows = json.load(file)
    except (UnicodeDecodeError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BrokenData(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise BrokenData(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except BrokenData:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise BrokenData(f"{path} cannot be read: {error}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise BrokenData(f"{path}, row {number}: a JSON {type(row).__name__}, not an object with columns")
    return ListRows(rows[:limit] if limit else rows, str(path))


def unpack(path: Path) -> tempfile._TemporaryFileWrapper[bytes]:
    """A temporary file with what is in a .gz file; it is removed when no longer referred to."""
    unpacked = tempfile.NamedTemporaryFile(prefix="proxima-")  # noqa: SIM115
    try:
        with gzip.open(path, "rb") as packed:
            shutil.copyfileobj(packed, unpacked)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BrokenData(f"{path} cannot be read: {error}") from None
    unpacked.flush()
    return unpacked
