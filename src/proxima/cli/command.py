"""`Command`: what every command of `proxima` is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class Command(ABC):
    """A dataclass: its fields are the flags, its docstring the help, `run` does the work.

    The other class attributes are for the help and the reference pages.
    """

    example: ClassVar[str]
    """A command line that works after `proxima data sample my-data`."""
    words: ClassVar[tuple[str, ...]] = ()
    """Flags that leading words stand for, in order; one that ends in `...` takes all words that are left."""
    writes: ClassVar[str]
    """What it leaves on disk, in Markdown."""
    guide: ClassVar[str]
    """The page of docs/ that explains it."""
    fails: ClassVar[str] = ""
    """What exit code 1 means where it is not a defect."""
    serves: ClassVar[str] = ""
    """The exit code of a server after Ctrl-C."""
    slow: ClassVar[str] = ""
    """Why the tests of the reference do not run the example."""

    @classmethod
    def purpose(cls) -> str:
        """Its docstring in one line."""
        return " ".join((cls.__doc__ or "").split())

    @abstractmethod
    def run(self) -> None: ...
