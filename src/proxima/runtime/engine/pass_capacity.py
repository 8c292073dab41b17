"""`PassCapacity`: the sizes of a captured pass, which short batches are filled up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxima.runtime.engine.layout import TILE, Layout


@dataclass(frozen=True)
class PassCapacity:
    """The largest batch that a graph can run."""

    tokens: int
    sequences: int
    longest: int
    reads: int

    def fits(self, layout: Layout) -> bool:
        if layout.total > self.tokens or layout.longest > self.longest or len(layout.read) > self.reads:
            return False
        return len(self.filled(layout.lengths)) <= self.sequences

    def filled(self, lengths: Sequence[int]) -> list[int]:
        """These sequences and then the sequences of padding that make up the rest."""
        left = self.tokens - sum(lengths)
        return [*lengths, *(min(self.longest, left - done) for done in range(0, left, self.longest))]

    def grow(self, layout: Layout) -> PassCapacity:
        """A capacity for this layout too, in coarse steps, with the sequences of padding that fill it up."""
        tokens = max(self.tokens, _round_up(layout.total, 256))
        longest = max(self.longest, _round_up(layout.longest, 128))
        sequences = _round_up(len(layout.lengths), 8) + _round_up(tokens, longest) // longest
        return PassCapacity(
            tokens, max(self.sequences, sequences), longest, max(self.reads, _round_up(len(layout.read), 128))
        )

    @property
    def tiles(self) -> int:
        """Most attention tiles that such a batch has."""
        return self.tokens // TILE + self.sequences

    @classmethod
    def of_passes(cls, tokens: int, sequences: int, longest: int, reads: int) -> PassCapacity:
        """A capacity for any pass within these bounds. What varies from batch to batch is rounded coarsely,
        so that few capacities are ever needed."""
        longest = min(tokens, 1 << (max(128, longest) - 1).bit_length())
        reads = _round_up(reads, 128) if reads <= 1024 else 1 << (reads - 1).bit_length()
        return cls(tokens, _round_up(sequences, 8) + -(-tokens // longest), longest, min(tokens, reads))


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
