"""`ReadAhead`: the next step's prompts become token ids while the update of this one runs.

In: what names the next prompts, and what reads them. Out: their ids, where they are the prompts of the next
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from proxima.core.types import Tokens


class ReadAhead:
    """Reads in a thread that ends with the update: it never runs beside anything else that reads texts."""

    def __init__(self, read: Callable[[Sequence[str]], Tokens]):
        self.next_prompts: Callable[[], Sequence[str]] | None = None
        """The prompts of the step after this one; None if there is none, or nobody knows."""
        self._read = read
        self._kept: tuple[Sequence[str], Tokens] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Read inside the block. What cannot be read is left to its own step, which says why."""
        self._kept, following = None, self.next_prompts
        if following is None:
            yield
            return

        def read() -> tuple[Sequence[str], Tokens]:
            prompts = following()
            return prompts, self._read(prompts)

        with ThreadPoolExecutor(1, "read-ahead") as pool:
            found = pool.submit(read)
            yield
        self._kept = None if found.exception() else found.result()

    def take(self, prompts: Sequence[str]) -> Tokens | None:
        """What was read of these very prompts (equal texts may have other columns), once."""
        kept, self._kept = self._kept, None
        if kept is None or list(map(id, kept[0])) != list(map(id, prompts)):
            return None
        return kept[1]
