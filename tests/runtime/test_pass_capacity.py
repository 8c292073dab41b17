"""What fits a captured pass can be filled in: its sequences, the padding and their attention tiles."""

import random
from types import SimpleNamespace

import pytest
import torch

from proxima.base_setup import MicroBatches
from proxima.runtime.engine import PassCapacity
from proxima.runtime.engine.graphed_passes import Capacities
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


SHAPES = {  # prompts, responses, batch, minibatch
    "one length": ((512, 512), (53, 53), 64, 64),
    "prompts": ((64, 512), (53, 53), 64, 32),
    "responses": ((512, 512), (1, 256), 64, 16),
    "both": ((60, 400), (1, 1024), 64, 16),
    "small": ((20, 80), (1, 10), 32, 8),
    "longer than a pass": ((500, 9000), (1, 3000), 16, 4),
}


def batch_of(lengths, responses):
    prompts = torch.tensor(lengths) - torch.tensor(responses)
    return SimpleNamespace(prompt_sizes=prompts, sizes=torch.tensor(responses))


def passes_of(micro_batches, lengths, responses, rows):
    """Layouts of the passes over these rows, as scoring and training pack them."""
    own = [lengths[row] for row in rows], [responses[row] for row in rows]
    for group in micro_batches.rows(batch_of(*own)):
        taken = [own[0][index] for index in group], [own[1][index] for index in group]
        yield layout(taken[0], sum(taken[1]))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_all_passes_of_a_step_have_the_capacity_that_its_batch_gives(name, processes):
    """Scoring and all minibatches, whatever was seen before: a resumed process takes the same products."""
    prompts, answers, size, minibatch = SHAPES[name]
    rng, ours, found = random.Random(name), Capacities(), set()
    padding = total = 0
    for _ in range(40):
        responses = [rng.randint(*answers) for _ in range(size)]
        lengths = [rng.randint(*prompts) + response for response in responses]
        micro_batches, restarted = MicroBatches(64, 8192, minibatch), Capacities()
        micro_batches.plan(batch_of(lengths, responses), processes)
        order, seen = rng.sample(range(size), size), set()
        share = minibatch // processes
        parts = [order[start : start + share] for start in range(0, size, share)]
        for rows in (range(size // processes), range(size // processes, size), *parts):
            if not rows:
                continue
            for each in passes_of(micro_batches, lengths, responses, rows):
                capacity = ours.of(each, micro_batches.capacity)
                assert capacity == restarted.of(each, micro_batches.capacity)
                filled = capacity.filled(each.lengths)
                assert len(filled) <= capacity.sequences
                assert len(tile_table(filled)) <= capacity.tiles
                seen.add(capacity)
                padding += capacity.tokens - each.total
                total += each.total
        assert len(seen) == 1
        found |= seen
    assert len(found) <= (1 if name == "one length" else 16)
    assert padding / total < {"one length": 0.07, "small": 0.8, "longer than a pass": 0.8}.get(name, 0.25)


def test_a_batch_that_was_not_planned_changes_nothing_for_those_that_were():
    capacities, planned = Capacities(), PassCapacity.of_passes(1024, 8, 256, 128)
    assert capacities.of(layout([200] * 4, 100), planned) is planned
    larger = capacities.of(layout([900] * 2, 100), planned)
    assert larger.tokens > planned.tokens
    assert capacities.of(layout([200] * 4, 100), planned) is planned
    assert capacities.of(layout([100], 10), None) is larger  # without a plan it grows as batches come
    assert capacities.known == [planned, larger]


def test_passes_of_a_step_that_has_ended_follow_from_their_own_sequences():
    micro_batches, lengths = MicroBatches(64, 8192, 64), [700] * 32
    micro_batches.plan(batch_of(lengths, [100] * 32))
    list(passes_of(micro_batches, [300] * 8, [50] * 8, range(8)))
    assert micro_batches.capacity.tokens > 7000
    micro_batches.plan(None)
    list(passes_of(micro_batches, [300] * 8, [50] * 8, range(8)))
    assert micro_batches.capacity.tokens == 2560
