"""What fits a captured pass can be filled in: its sequences, the padding and their attention tiles."""

import random
from types import SimpleNamespace

from proxima.runtime.engine.cuda_graphs import PassCapacity
from proxima.runtime.engine.layout import tile_table


def layout(lengths, reads):
    return SimpleNamespace(
        lengths=tuple(lengths), total=sum(lengths), longest=max(lengths), read=range(reads)
    )


def test_a_batch_that_fits_can_be_filled_in_and_growing_makes_room_for_it():
    rng = random.Random(0)
    for _ in range(300):
        known, refused = PassCapacity(1024, 0, 0, 0), 0
        for _ in range(12):
            lengths = [rng.randint(1, rng.choice((5, 60, 300))) for _ in range(rng.randint(1, 70))]
            batch = layout(lengths, rng.randint(1, sum(lengths)))
            if not known.fits(batch):
                refused += 1
                known = known.grow(batch)
            assert known.fits(batch)
            filled = known.filled(batch.lengths)
            assert sum(filled) == known.tokens
            assert min(filled) > 0
            assert len(filled) <= known.sequences
            assert len(tile_table(filled)) <= known.tiles
        assert refused < 12


def test_more_and_shorter_sequences_than_it_was_made_for_do_not_fit():
    known = PassCapacity(0, 0, 0, 0).grow(layout([256] * 32, 32))
    assert known.fits(layout([256] * 32, 32))
    assert not known.fits(layout([10] * 64, 64))
