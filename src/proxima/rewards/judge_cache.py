"""`JudgeCache`: what a judge said, in one SQLite file. In: a request's key. Out: its number, where known.

A resumed run then sees the same scores, and nothing is asked or paid for twice. The file holds hashes and
numbers, no texts and no keys.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from pathlib import Path

log = logging.getLogger(__name__)

CACHE_FILE = "judge_cache.sqlite"
TABLE = "judged (key TEXT PRIMARY KEY, number REAL)"
WAIT_SECONDS = 30.0  # for another process that writes


class JudgeCache:
    """Without a folder it keeps nothing. Where the file cannot be used it warns once and keeps nothing."""

    def __init__(self, folder: Path | None = None):
        self.path = None if folder is None else folder / CACHE_FILE
        if self.path and (self.path.is_symlink() or (self.path.exists() and not self.path.is_file())):
            log.warning("%s is not a file of this run, judges are asked anew", self.path)
            self.path = None
        self._connection: sqlite3.Connection | None = None

    def get(self, key: str) -> float | None:
        rows = self._run("SELECT number FROM judged WHERE key = ?", key)
        number = rows[0][0] if rows else None
        return number if isinstance(number, float) and math.isfinite(number) else None

    def put(self, key: str, number: float) -> float:
        """The number that is kept: of two processes that asked at once, that of the first."""
        self._run("INSERT OR IGNORE INTO judged VALUES (?, ?)", key, float(number))
        kept = self.get(key)
        return number if kept is None else kept

    def forget(self, key: str) -> None:
        self._run("DELETE FROM judged WHERE key = ?", key)

    def _run(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        if self.path is None:
            return []
        try:
            if self._connection is None:
                # all calls come from the one thread of `run_async`, whichever thread made this object
                self._connection = sqlite3.connect(self.path, timeout=WAIT_SECONDS, check_same_thread=False)
                self._connection.execute(f"CREATE TABLE IF NOT EXISTS {TABLE}")
                found = self._connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
                if found.fetchmany(2) != [(f"CREATE TABLE {TABLE}",)]:
                    raise sqlite3.DatabaseError("it holds something else")  # such as a view, which may hang
            with self._connection:
                return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            log.warning("%s cannot be used, judges are asked anew: %s", self.path, error)
            self.path = None
            return []
