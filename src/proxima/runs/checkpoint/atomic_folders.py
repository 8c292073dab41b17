"""Folders that are whole or not there: renamed into place, with a manifest of checksums that is verified.

In: a function that fills a folder. Out: the folder in its place, with checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from proxima.core.regular_files import read_file

MANIFEST = "manifest.json"
FORMAT = 1


class Damaged(ValueError):  # noqa: N818
    """A folder that is not what was written; the message says which file, and how."""


def write_folder(target: Path, fill: Callable[[Path], object], manifest: bool = True) -> Path:
    """Fill a hidden folder beside the target, flush every file to disk, then rename: nobody ever sees a part
    of it. A folder of that name makes room at the last moment and is deleted only when the new one has its
    place.

    Args:
        manifest: also note the size and checksum of every file, for `check_folder`.
    """
    part, gone = _beside(target, "part"), _beside(target, "gone")
    try:
        remove_folder(part)
        part.mkdir(parents=True)
        fill(part)
        if manifest:
            (part / MANIFEST).write_text(
                json.dumps({"format": FORMAT, "files": _describe(part)}, indent=1), encoding="utf-8"
            )
        for path in [*_files(part), *(path for path in part.rglob("*") if path.is_dir()), part]:
            sync(path)
        shutil.rmtree(gone, ignore_errors=True)
        if target.exists():
            target.rename(gone)
        part.rename(target)
        sync(target.parent)
        shutil.rmtree(gone, ignore_errors=True)
    except BaseException as error:
        if gone.exists() and not target.exists():
            gone.rename(target)
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, SafetensorError):  # it hides the system's own error, a full disk for example
            raise OSError(str(error)) from error
        raise
    return target


def check_folder(folder: Path) -> None:
    """`Damaged` where any file is missing, too many, of another size, or has another checksum than the
    manifest says."""
    try:
        noted = json.loads(read_file(folder / MANIFEST))
        form = noted["format"]
        files = {
            str(name): (int(note["bytes"]), str(note["sha256"])) for name, note in noted["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{MANIFEST} cannot be read") from None
    if form != FORMAT:
        raise Damaged(f"{MANIFEST} has the format {form!r}, this version reads {FORMAT}")
    present = {str(path.relative_to(folder)) for path in _files(folder)} - {MANIFEST}
    if odd := sorted(present ^ set(files)):
        raise Damaged(f"{odd[0]} is {'not in the manifest' if odd[0] in present else 'missing'}")
    for name, (size, checksum) in files.items():
        path = folder / name
        if path.stat().st_size != size:
            raise Damaged(f"{name} has {path.stat().st_size} bytes, not {size}")
        if _checksum(path) != checksum:
            raise Damaged(f"{name} does not have the checksum it was written with")


def remove_folder(folder: Path) -> None:
    """Gone at once under its own name, so that a deletion cut short leaves nothing that looks damaged."""
    if folder.exists():
        gone = _beside(folder, "gone")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone)


def remove_leftovers(parent: Path) -> None:
    """What a killed process left half-written or half-deleted."""
    for path in parent.glob(".*"):
        if path.suffix in (".part", ".gone"):
            shutil.rmtree(path, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """A small file rewritten in one move: the old text or the new, never a mixture."""
    part = _beside(path, "part")
    part.write_text(text, encoding="utf-8")
    sync(part)
    part.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder's list of names to the disk itself."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _describe(folder: Path) -> dict[str, dict[str, object]]:
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _checksum(path)}
        for path in _files(folder)
    }


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
