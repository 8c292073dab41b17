"""`proxima report`: a run as one HTML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from proxima.cli.command import Command
from proxima.core.terminal_text import visible


@dataclass
class Report(Command):
    """Write a run's report: one HTML file that works offline, with curves, samples and the token
    microscope."""

    words: ClassVar[tuple[str, ...]] = ("folder",)
    example: ClassVar[str] = "proxima report runs/first"
    writes: ClassVar[str] = "`report.html` in the run's folder, or `--output`."
    guide: ClassVar[str] = "report.md"

    folder: Path
    """Folder of the run, finished or still training; may be given without the flag."""
    output: Path | None = None
    """The file to write; by default report.html in the run's folder."""
    open: bool = False
    """Show it in the browser."""

    def run(self) -> None:
        import webbrowser

        from proxima.config import settings_in
        from proxima.pages.report import summary, write_report
        from proxima.runs import Run

        found = Run(self.folder)
        if settings_in(self.folder) is not None or found.kind != "ppo":
            raise ValueError(
                f"{self.folder} holds a fine-tuning run; what it measured is in its sft.json or reward.json"
            )
        if not found.config and not found.metrics()["step"]:
            raise ValueError(
                f"{self.folder} holds no run: neither config.yaml nor metrics.jsonl can be read in it"
            )
        path = write_report(found, self.output)
        print(f"{summary(found)}\nreport: {visible(str(path))}")
        if self.open:
            webbrowser.open(path.resolve().as_uri())
