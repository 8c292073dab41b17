"""Files of JSON lines that may grow, be cut back or be broken.

In: a path. Out: whole records; only what is new is read.
"""

from __future__ import annotations

import json
from pathlib import Path

from proxima.core.json_record import Record
from proxima.core.regular_files import open_file


class JsonLines:
    """The records of a file so far.

    A last line without a line end is still being written; it is read at the next look.
    """

    def __init__(self, path: Path):
        self.path = path
        self.records: list[Record] = []
        self.problems: list[str] = []
        self.version = 0  # grows when earlier records are no longer what they were
        self._seen, self._lines, self._last = 0, 0, b""

    def look(self) -> list[Record]:
        """All records. Only what is new is read, or everything where the file was cut back."""
        try:
            with open_file(self.path, follow=False) as file:
                file.seek(self._seen - len(self._last))
                if file.read(len(self._last)) != self._last:
                    self._forget()
                    file.seek(0)
                new = file.read()
        except FileNotFoundError:
            self._forget()
            return self.records
        except OSError as error:
            self.problems = [f"{self.path.name} cannot be read: {error.strerror or error}"]
            return self.records
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            self._lines += 1
            self._add(line)
        if whole:
            self._seen += len(whole)
            self._last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
        return self.records

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if (
            isinstance(record, dict)
            and isinstance(step := record.get("step"), (int, float))
            and abs(step) < 2**53
        ):
            record["step"] = int(step)
            self.records.append(record)
        elif len(self.problems) < 20:
            self.problems.append(
                f"{self.path.name} line {self._lines} is not a record of a step and is left out"
            )

    def _forget(self) -> None:
        self.version += bool(self.records)
        self.records = []
        self.problems = []
        self._seen, self._lines, self._last = 0, 0, b""


def last_record(path: Path, most: int = 65536) -> Record:
    """The last whole record without reading the rest; empty if there is none."""
    try:
        with open_file(path, follow=False) as file:
            file.seek(max(file.seek(0, 2) - most, 0))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            return record
    return {}
