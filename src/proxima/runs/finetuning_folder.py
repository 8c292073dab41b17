"""The folder of a fine-tuning run while it trains. In: the folder. Out: a lock, a log, and one line of
`metrics.jsonl` per evaluation, as a PPO run has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from proxima.runs.glossary import check_declared
from proxima.runs.run_origin import ORIGIN, Kind, write_origin
from proxima.runs.run_writer import METRICS, lock_folder, log_file, write_line

LIVE_FILES = (METRICS, "log.txt", ".lock", ORIGIN)


@contextmanager
def live_folder(folder: Path, kind: Kind) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Gives a function that writes the metrics of an evaluation. A run that fails before its first one leaves
    nothing behind."""
    written = 0

    def write(metrics: Mapping[str, float]) -> None:
        nonlocal written
        check_declared(metrics)
        write_line(file, metrics)
        written += 1

    with lock_folder(folder), log_file(folder / "log.txt"):
        try:
            with (folder / METRICS).open("w", encoding="utf-8") as file:
                write_origin(folder, kind)
                yield write
        except BaseException:
            if not written:
                _clear(folder)
            raise


def _clear(folder: Path) -> None:
    for name in LIVE_FILES:
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
