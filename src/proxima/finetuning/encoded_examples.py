"""Examples as token ids, encoded one at a time.

In: examples, and which of them are used. Out: a sequence that encodes an item when it is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar, overload


class Prompted(Protocol):
    """What a demonstration, a preference and a rating have in common."""

    @property
    def prompt(self) -> str: ...


Example = TypeVar("Example", bound=Prompted)
TokenRow = TypeVar("TokenRow")


class Encoded(Sequence[TokenRow], Generic[Example, TokenRow]):
    """Examples as token ids, encoded when read; a slice is a list."""

    def __init__(
        self,
        examples: Sequence[Example],
        encode: Callable[[Example], TokenRow],
        lengths: Iterable[tuple[int, int]],
    ):
        """
        Args:
            lengths: position and length of each example that is used.
        """
        self.examples = examples
        self._encode = encode
        self.places = array("Q")
        self.lengths = array("Q")
        for place, length in lengths:
            self.places.append(place)
            self.lengths.append(length)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenRow]: ...
    def __getitem__(self, index: int | slice) -> TokenRow | list[TokenRow]:
        if isinstance(index, slice):
            return [self._encode(self.examples[place]) for place in self.places[index]]
        return self._encode(self.examples[self.places[index]])
