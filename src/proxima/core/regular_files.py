"""Files that strangers made. In: a path. Out: the file, open; an error at once where it is a pipe or a
device.

Opening a named pipe waits for whoever writes to it, perhaps for ever, and a device may never end.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

OPEN_ALREADY = (
    "/dev/fd/",
    "/dev/stdin",
    "/proc/self/fd/",
)  # what a shell has opened for us, as in <(command)


def open_file(path: str | Path) -> BinaryIO:
    """A regular file, for reading. An OSError where it is none."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise IsADirectoryError(21, "it is a folder", str(path))
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(22, "it is a pipe or a device, not a file", str(path))
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_file(path: str | Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def read_given(path: str | Path, most: int = -1) -> bytes:
    """A file that the user named, or its first so many bytes: also what the shell has opened, `<(command)`
    or /dev/stdin."""
    with open(path, "rb") if str(path).startswith(OPEN_ALREADY) else open_file(path) as file:
        return file.read(most)
