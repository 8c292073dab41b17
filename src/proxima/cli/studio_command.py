"""`proxima studio`: the runs of a folder on a local page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from proxima.cli.command import Command
from proxima.core.terminal_text import visible

if TYPE_CHECKING:
    from proxima.pages.label import Store

FEEDBACK = Path("feedback.db")


@dataclass
class Studio(Command):
    """Look at runs on a local web page while they train and after: charts, samples, every token,
    comparison, labelling."""

    words: ClassVar[tuple[str, ...]] = ("run-dir",)
    example: ClassVar[str] = "proxima studio runs"
    writes: ClassVar[str] = "Nothing in the runs' folders."
    guide: ClassVar[str] = "studio.md"
    serves: ClassVar[str] = "0"

    run_dir: Path = Path("runs")
    """Folder of runs; may be given without the flag."""
    label_db: Path | None = None
    """A file of `proxima label`, to continue labelling inside the studio. By default feedback.db if
    there is one."""
    overlap: float = 0.2
    """Share of the items to label that every annotator gets, as for `label`."""
    host: str = "127.0.0.1"
    """Address to listen on. The default cannot be reached from other machines; over any other the traffic
    is not encrypted."""
    port: int = 0
    """Port to listen on; 0 = a free one."""
    open: bool = False
    """Open the page in the browser."""

    def run(self) -> None:
        from proxima.pages.studio import Library, make_studio_app
        from proxima.pages.web import Site, serve

        if not self.run_dir.is_dir():
            raise ValueError(
                f"there is no folder {self.run_dir}; --run-dir names the folder in which `proxima train` "
                "keeps runs"
            )
        store = self._store()
        site = Site(self.host, self.port)
        serve(make_studio_app(Library(self.run_dir), site, store), site, self.open)

    def _store(self) -> Store | None:
        from proxima.pages.label import Store

        if self.label_db is not None:
            if not self.label_db.is_file():
                raise ValueError(
                    f"there is no {self.label_db} (--label-db); make one with `proxima label --db "
                    f"{self.label_db}`"
                )
            return Store(self.label_db, overlap=self.overlap)
        if not FEEDBACK.is_file():
            return None
        try:
            return Store(FEEDBACK, overlap=self.overlap)
        except ValueError as error:  # nobody named it: the runs can be looked at all the same
            print(f"proxima: {visible(str(error))}; the studio goes without a label page", file=sys.stderr)
            return None
