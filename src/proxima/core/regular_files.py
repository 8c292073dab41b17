"""Opens files from untrusted sources: an error at once for a pipe, a socket or a device.

Opening a named pipe blocks until something writes to it, perhaps indefinitely, and a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

OPEN_ALREADY = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Paths of what a shell has opened already, as in <(command)."""


def open_file(path: str | Path, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading; raises an OSError for anything else.

    Args:
        follow: False refuses a link: in a folder from elsewhere it could name any file of this machine.
    """
    if not follow and os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path))
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise IsADirectoryError(21, "it is a folder", str(path))
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise _irregular(path)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def check_files(path: str | Path) -> None:
    """An OSError where this path, or a file in this folder or in its subfolders, is a pipe, a socket or a
    device: for what a library is about to open by itself."""
    for place in (Path(path), *Path(path).glob("*"), *Path(path).glob("*/*")):
        try:
            kind = os.stat(place).st_mode
        except OSError:  # a link that leads nowhere; or it cannot be read, which its reader says
            continue
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise _irregular(place)


def _irregular(path: str | Path) -> OSError:
    return OSError(22, "it is a pipe or a device, not a file", str(path))


def read_file(path: str | Path, follow: bool = True) -> bytes:
    with open_file(path, follow) as file:
        return file.read()


def read_given(path: str | Path, most: int = -1) -> bytes:
    """The content, or the first `most` bytes, of a file that the user named. `<(command)` and /dev/stdin work
    too."""
    with open(path, "rb") if str(path).startswith(OPEN_ALREADY) else open_file(path) as file:
        return file.read(most)
