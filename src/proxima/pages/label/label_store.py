"""Items and answers in an SQLite file: which item comes next, control questions, undo. In: items, then one
answer at a time. Out: what to show next; all answers.

Every answer is a transaction of its own, on disk before the call returns. Many threads and processes may use
one file: each call opens a connection of its own, and an annotator has at most one answer per item. What is
stored is the true side (a or b), never the place where it was shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import sqlite3
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from proxima.core.chat_turns import Turn, turns_of
from proxima.core.json_record import Record
from proxima.core.terminal_text import is_encodable
from proxima.pages.web import Conflict

APPLICATION = 0x50524C42  # "PRLB"
VERSION = 1
SCHEMA = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value NOT NULL);
CREATE TABLE items (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    prompt TEXT NOT NULL,
    a TEXT NOT NULL, a_ended INTEGER NOT NULL, a_model TEXT NOT NULL,
    b TEXT, b_ended INTEGER, b_model TEXT
);
CREATE TABLE answers (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    item INTEGER NOT NULL REFERENCES items (id),
    annotator TEXT NOT NULL,
    choice TEXT NOT NULL CHECK (choice IN ('a', 'b', 'tie', 'skip', '1', '2', '3', '4', '5')),
    swapped INTEGER NOT NULL,
    seconds REAL NOT NULL,
    time TEXT NOT NULL,
    UNIQUE (item, annotator)
);
"""
# apart, so that older files gain it and older versions still read newer files
TURNS = (
    "CREATE TABLE IF NOT EXISTS turns (item INTEGER PRIMARY KEY REFERENCES items (id), turns TEXT NOT NULL)"
)
EXTRAS = (
    TURNS,
    "CREATE TABLE IF NOT EXISTS controls (item INTEGER PRIMARY KEY, expected TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS notes (answer INTEGER PRIMARY KEY, note TEXT NOT NULL)",
)
ITEMS = "SELECT items.*, turns.turns FROM items LEFT JOIN turns ON turns.item = items.id"
CHOICES = {"pairs": ("1", "2", "tie", "skip"), "ratings": ("1", "2", "3", "4", "5", "skip")}
"""What may be answered, by mode. For pairs, 1 and 2 are the places on the page."""

CONTROL_EVERY = 10  # answers of one annotator among which one control question comes
HIDDEN_BITS = 12  # of 64, so that a browser's numbers hold the rest
LONGEST_NOTE, LONGEST_INSTRUCTIONS = 2000, 20_000

# The items that an annotator may still get: those that everyone gets (control questions, and where
# ceil(id * overlap) grows: an even share of all), and those without an answer. :overlap is in millionths, so
# that the division is one of integers.
OPEN = """
FROM (
    SELECT items.id,
        (items.id * :overlap + 999999) / 1000000 > ((items.id - 1) * :overlap + 999999) / 1000000 AS shared,
        count(answers.id) AS answered, count(CASE WHEN choice <> 'skip' THEN 1 END) AS judged,
        coalesce(sum(annotator = :annotator), 0) AS own, items.id IN (SELECT item FROM controls) AS control
    FROM items LEFT JOIN answers ON answers.item = items.id GROUP BY items.id
) WHERE own = 0 AND (shared OR control OR judged = 0)
"""


@dataclass(frozen=True)
class Item:
    """A prompt with two completions to compare, or one (a) to rate; `*_ended` is False for one that was
    cut off."""

    prompt: str
    a: str
    b: str | None = None
    a_ended: bool = True
    b_ended: bool | None = None
    a_model: str = ""
    b_model: str | None = None
    id: int = 0
    turns: list[Turn] = field(default_factory=list)
    """The prompt as a conversation, as the file keeps it; a prompt that carries its turns needs none here."""

    @property
    def mode(self) -> str:
        return "ratings" if self.b is None else "pairs"

    @property
    def digest(self) -> str:
        """The same for the same texts, whichever side they are on."""
        sides = sorted(
            [[self.a, bool(self.a_ended)], *([] if self.b is None else [[self.b, bool(self.b_ended)]])]
        )
        return hashlib.sha256(json.dumps([self.prompt, sides]).encode()).hexdigest()


@dataclass(frozen=True)
class LabelAnswer:
    """One annotator's answer on one item: choice is a, b, tie or skip, or 1 to 5; `swapped`: b was shown
    first."""

    id: int
    item: int
    annotator: str
    choice: str
    swapped: bool
    seconds: float
    time: str
    note: str = ""


class Store:
    """The file. It is made when it is not there; `mode` and `seed` are kept in it and count only then."""

    def __init__(self, path: str | Path, mode: str | None = None, seed: int = 0, overlap: float = 0.2):
        if mode not in (None, *CHOICES):
            raise ValueError(f"mode ({mode!r}) must be one of {', '.join(CHOICES)}")
        if not 0 <= overlap <= 1:
            raise ValueError(
                f"overlap ({overlap}) must be in [0, 1]: the share of items that every annotator gets"
            )
        self.path, self.overlap = Path(path), overlap
        self._handles: dict[int, int] = {}
        try:
            self._prepare(mode or "pairs", seed)
            with self._open() as db:
                settings = dict(db.execute("SELECT name, value FROM settings").fetchall())
                [found] = db.execute("PRAGMA quick_check(1)").fetchone()
            self.counts()
            self.mode: str = settings["mode"]
            self.seed: int = settings["seed"]
            self._secret: str = settings["secret"]
        except (sqlite3.Error, KeyError) as error:
            raise ValueError(f"cannot use {path} as a feedback database: {error}") from None
        if found != "ok":
            raise ValueError(
                f"cannot use {path} as a feedback database: it is damaged ({found.splitlines()[-1]})"
            )
        if mode and mode != self.mode:
            raise ValueError(f"{path} holds {self.mode}; for {mode} choose another --db")

    def _prepare(self, mode: str, seed: int) -> None:
        """Make the tables, or see that they are ours; two processes may do so at once."""
        with self._open() as db:
            db.execute("PRAGMA journal_mode = WAL")
        with self._change() as db:
            [application], [version] = (
                db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
            )
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and application != APPLICATION:
                raise ValueError(f"{self.path} is a database of something else; choose another --db")
            if tables and version != VERSION:
                raise ValueError(
                    f"{self.path} has schema version {version}, this Proxima reads {VERSION}; choose "
                    "another --db"
                )
            if not tables:
                for statement in SCHEMA.split(";"):
                    db.execute(statement)
                db.executemany("INSERT INTO settings VALUES (?, ?)", [("mode", mode), ("seed", seed)])
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {VERSION}")
            for statement in EXTRAS:
                db.execute(statement)
            db.execute("INSERT OR IGNORE INTO settings VALUES ('secret', ?)", (secrets.token_hex(16),))

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self.path, timeout=30, isolation_level=None)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("PRAGMA trusted_schema = OFF")  # the file may be a stranger's
            db.execute("PRAGMA synchronous = FULL")
            yield db
        finally:
            db.close()

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One transaction that holds the write lock from its start."""
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    # --- items ---

    def add_items(self, items: Iterable[Item]) -> int:
        """Add what is not yet there, all or nothing; how many were new."""
        rows, turns = [], []
        for number, item in enumerate(items, 1):
            if item.mode != self.mode:
                raise ValueError(
                    f"{self.path} holds {self.mode}, item {number} is one of {item.mode}; choose another --db"
                )
            kept = item.turns or getattr(item.prompt, "turns", None)
            if not is_encodable([item.prompt, item.a, item.b, kept]):
                raise ValueError(f"item {number} holds half a character (a lone surrogate); fix the text")
            sides = (item.a, item.a_ended, item.a_model, item.b, item.b_ended, item.b_model)
            rows.append((item.digest, item.prompt, *sides))
            if kept:
                turns.append((json.dumps(kept), item.digest))
        columns = "digest, prompt, a, a_ended, a_model, b, b_ended, b_model"
        with self._change() as db:
            added = db.executemany(
                f"INSERT OR IGNORE INTO items ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows
            ).rowcount
            db.executemany("INSERT OR IGNORE INTO turns SELECT id, ? FROM items WHERE digest = ?", turns)
            return added

    def add_controls(self, items: Sequence[Item], expected: Sequence[str]) -> int:
        """Add items whose answer is known (a or b, or a rating), as control questions; how many were new."""
        self.add_items(items)
        added = 0
        with self._change() as db:
            for item, answer in zip(items, expected, strict=True):
                row = db.execute(
                    "SELECT id, a, a_ended FROM items WHERE digest = ?", (item.digest,)
                ).fetchone()
                # it was there, with its sides the other way
                same = (row["a"], bool(row["a_ended"])) == (item.a, bool(item.a_ended))
                turned = item.b is not None and not same
                given = (row["id"], {"a": "b", "b": "a"}[answer] if turned else answer)
                added += db.execute("INSERT OR IGNORE INTO controls VALUES (?, ?)", given).rowcount
        return added

    def controls(self) -> dict[int, str]:
        """The known answers, by item."""
        with self._open() as db:
            return {row["item"]: row["expected"] for row in db.execute("SELECT * FROM controls")}

    @property
    def instructions(self) -> str:
        """What annotators read before they begin; empty where nothing was written."""
        with self._open() as db:
            row = db.execute("SELECT value FROM settings WHERE name = 'instructions'").fetchone()
        return str(row["value"]) if row else ""

    @instructions.setter
    def instructions(self, text: str) -> None:
        if len(text) > LONGEST_INSTRUCTIONS or not is_encodable(text):
            raise ValueError(
                f"the instructions must be text of at most {LONGEST_INSTRUCTIONS:,} characters, got "
                f"{len(text):,}"
            )
        with self._change() as db:
            db.execute("INSERT OR REPLACE INTO settings VALUES ('instructions', ?)", (text,))

    def items(self) -> list[Item]:
        with self._open() as db:
            return [_item(row) for row in db.execute(f"{ITEMS} ORDER BY items.id")]

    def item(self, number: int) -> Item:
        with self._open() as db:
            row = db.execute(f"{ITEMS} WHERE items.id = ?", (number,)).fetchone()
        if row is None:
            raise ValueError(f"there is no item {number}")
        return _item(row)

    def counts(self) -> tuple[int, int]:
        """How many items and answers there are."""
        with self._open() as db:
            return tuple(
                db.execute("SELECT (SELECT count(*) FROM items), (SELECT count(*) FROM answers)").fetchone()
            )

    # --- one annotator ---

    def next_item(self, annotator: str) -> Item | None:
        """What to show next: shared items first, so that agreement is known early; of these the ones with
        the fewest answers; of these in an order of the annotator's own. Among every `CONTROL_EVERY` answers
        comes one control question, at a place that only this file knows, while there are others to hide it:
        surplus ones are not asked."""
        stride = self._hash("order", annotator) % (2**31 - 2**20) + 2**20
        order = "ORDER BY control DESC, shared DESC, answered, (id * :stride) % 2147483647 LIMIT 1"
        with self._open() as db:
            if not self._ordinary(db, annotator):
                return None
            given = {"stride": stride, "due": self._is_due(annotator, self._done(db, annotator))}
            row = db.execute(
                f"SELECT id {OPEN} AND control <= :due {order}", {**self._given(annotator), **given}
            ).fetchone()
        return self.item(row["id"]) if row else None

    def _is_due(self, annotator: str, done: int) -> bool:
        """Whether a control question comes after this many answers."""
        block, place = divmod(done, CONTROL_EVERY)
        return place == _digest(self._secret, "control", annotator, block) % CONTROL_EVERY

    def _ordinary(self, db: sqlite3.Connection, annotator: str) -> int:
        """Open items that are not control questions."""
        found = db.execute(f"SELECT count(*) {OPEN} AND NOT control", self._given(annotator)).fetchone()
        return int(found[0])

    def progress(self, annotator: str) -> tuple[int, int]:
        """How many items the annotator has answered, and how many are left for them.

        Where there are control questions, at most how many: a count that followed anybody's answers would
        tell them, because an answer to any other item may take it from everyone else.
        """
        controls, (items, _) = len(self.controls()), self.counts()
        with self._open() as db:
            done, left = self._done(db, annotator), self._ordinary(db, annotator)
        if left and controls:
            left = max(1, self._most(annotator, items - controls, controls) - done)
        return done, left

    def _most(self, annotator: str, ordinary: int, controls: int) -> int:
        """How many items the annotator gets if nobody else answers any."""
        asked = 0
        while ordinary and controls:
            due = self._is_due(annotator, asked)
            ordinary = ordinary - (not due)
            controls = controls - due
            asked = asked + 1
        return asked + ordinary

    @staticmethod
    def _done(db: sqlite3.Connection, annotator: str) -> int:
        count = db.execute("SELECT count(*) FROM answers WHERE annotator = ?", (annotator,)).fetchone()[0]
        return int(count)

    def _given(self, annotator: str) -> Record:
        return {"annotator": annotator, "overlap": round(self.overlap * 1e6)}

    def is_swapped(self, item: int, annotator: str) -> bool:
        """Whether b is shown first: a coin that falls the same way every time for one item and annotator."""
        return self.mode == "pairs" and bool(self._hash("side", item, annotator) & 1)

    def _hash(self, *words: object) -> int:
        return _digest(self.seed, *words)

    def handle(self, item: int) -> int:
        """An item's number on the page: it does not tell when the item was added."""
        return _digest(self._secret, "item", item) >> HIDDEN_BITS

    def item_of(self, handle: int) -> int:
        if handle not in self._handles:
            with self._open() as db:
                numbers = [int(row["id"]) for row in db.execute("SELECT id FROM items")]
            self._handles = {self.handle(number): number for number in numbers}
        if handle not in self._handles:
            raise ValueError(f"there is no item {handle}")
        return self._handles[handle]

    def add_answer(self, item: int, annotator: str, choice: str, seconds: float = 0.0, note: str = "") -> int:
        """Store what was chosen on the page and return the answer's number. The same answer again changes
        nothing (it may have been sent twice); another one for the same item is refused."""
        annotator = check_annotator(annotator)
        if choice not in CHOICES[self.mode]:
            raise ValueError(f"choice ({choice!r}) must be one of {', '.join(CHOICES[self.mode])}")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 10**9:
            raise ValueError(f"seconds ({seconds!r}) must be a number from 0 up")
        if not isinstance(note, str) or len(note) > LONGEST_NOTE or not is_encodable(note):
            raise ValueError(f"the note must be text of at most {LONGEST_NOTE} characters")
        self.item(item)
        swapped = self.is_swapped(item, annotator)
        true = (
            {"1": "b" if swapped else "a", "2": "a" if swapped else "b"}.get(choice, choice)
            if self.mode == "pairs"
            else choice
        )
        time = datetime.now(UTC).isoformat(timespec="seconds")
        with self._change() as db:
            given = (item, annotator)
            before = db.execute(
                "SELECT id, choice FROM answers WHERE item = ? AND annotator = ?", given
            ).fetchone()
            if before and before["choice"] != true:
                raise Conflict(
                    "you have answered this item already, perhaps in another tab; the first answer was kept"
                )
            if before:
                return int(before["id"])
            row = (item, annotator, true, swapped, float(seconds), time)
            added = db.execute(
                "INSERT INTO answers (item, annotator, choice, swapped, seconds, time) VALUES (?, ?, ?, ?, "
                "?, ?)",
                row,
            )
            assert added.lastrowid is not None
            if note.strip():
                db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (added.lastrowid, note.strip()))
            return added.lastrowid

    def last_answer(self, annotator: str) -> int | None:
        with self._open() as db:
            number: int | None = db.execute(
                "SELECT max(id) FROM answers WHERE annotator = ?", (annotator,)
            ).fetchone()[0]
        return number

    def undo(self, annotator: str, answer: int) -> int | None:
        """Remove the annotator's last answer, which must be this one; its item.

        None where it is gone already.
        """
        with self._change() as db:
            last = db.execute("SELECT max(id) FROM answers WHERE annotator = ?", (annotator,)).fetchone()[0]
            row = db.execute(
                "SELECT item FROM answers WHERE id = ? AND annotator = ?", (answer, annotator)
            ).fetchone()
            if row is None:
                return None
            if answer != last:
                raise Conflict("there is a later answer, perhaps from another tab; undo that one first")
            db.execute("DELETE FROM notes WHERE answer = ?", (answer,))
            db.execute("DELETE FROM answers WHERE id = ?", (answer,))
            return int(row["item"])

    # --- everyone ---

    def settled_answers(self) -> list[LabelAnswer]:
        """Of each annotator all full runs of `CONTROL_EVERY` answers: figures that move with these alone do
        not tell which of them was a control question. All answers where there are no such questions."""
        every = self.answers()
        if not self.controls():
            return every
        counts = Counter(each.annotator for each in every)
        place = Counter[str]()
        kept = []
        for each in every:
            place[each.annotator] += 1
            if place[each.annotator] <= counts[each.annotator] // CONTROL_EVERY * CONTROL_EVERY:
                kept.append(each)
        return kept

    def answers(self) -> list[LabelAnswer]:
        with self._open() as db:
            rows = db.execute(
                "SELECT answers.*, coalesce(note, '') AS note FROM answers "
                "LEFT JOIN notes ON notes.answer = answers.id ORDER BY id"
            ).fetchall()
        return [LabelAnswer(**{**dict(row), "swapped": bool(row["swapped"])}) for row in rows]

    def annotators(self) -> list[str]:
        with self._open() as db:
            return [row[0] for row in db.execute("SELECT DISTINCT annotator FROM answers ORDER BY annotator")]


def _digest(*words: object) -> int:
    digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _item(row: sqlite3.Row) -> Item:
    values: Record = {name: row[name] for name in row.keys() if name not in ("digest", "turns")}  # noqa: SIM118
    with contextlib.suppress(ValueError, RecursionError):  # the file may be a stranger's
        turns = turns_of("", json.loads(row["turns"] or "[]"))
        values["turns"] = turns if is_encodable(turns) else []
    values["a_ended"] = bool(values["a_ended"])
    values["b_ended"] = None if values["b"] is None else bool(values["b_ended"])
    return Item(**values)


def check_annotator(name: object) -> str:
    """A name as it is stored: one spelling, no spaces around it; or an error."""
    if not isinstance(name, str):
        raise ValueError("the annotator's name must be a string")
    clean = " ".join(unicodedata.normalize("NFC", name).split())
    if not 1 <= len(clean) <= 60 or not all(character.isprintable() for character in clean):
        raise ValueError("the annotator's name must have 1 to 60 printable characters")
    return clean
