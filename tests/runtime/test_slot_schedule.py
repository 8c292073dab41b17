"""Which sequences decode in which slots: all of them once, and few slots wait."""

import random
from collections import Counter

import pytest

from proxima.runtime.engine.slot_schedule import BUCKETS, SlotSchedule

LENGTHS = {
    "even": lambda rng: rng.randint(8, 256),
    "even, long": lambda rng: rng.randint(64, 1024),
    "short": lambda rng: min(256, 1 + int(rng.expovariate(1 / 128))),
    "long": lambda rng: min(1024, 1 + int(rng.expovariate(1 / 512))),
    "a few very long": lambda rng: min(8192, 1 + int(rng.expovariate(1 / 300))),
    "skewed": lambda rng: min(4096, 1 + int(rng.lognormvariate(6, 0.8))),
    "two kinds": lambda rng: rng.choice((60, 1000)),
}


def run(lengths, slots, on_gpu, limit):
    """Steps and tokens that were decoded by the number of slots; the first token is the prefill's."""
    schedule, left, seen = SlotSchedule(len(lengths), slots, on_gpu), [0] * slots, []
    steps, decoded = Counter(), Counter()
    while True:
        for row, slot in schedule.take(limit):
            assert left[slot] == 0
            assert slot < schedule.used <= slots
            left[slot] = lengths[row] - 1
            seen.append(row)
        count, used = schedule.steps, schedule.used
        steps[used] += count
        decoded[used] += sum(min(count, tokens) for tokens in left[:used])
        left = [max(0, tokens - count) for tokens in left]
        schedule.stepped(count)
        alive = [slot for slot in range(used) if left[slot]]
        if not alive and not schedule.waiting:
            break
        for old, new in schedule.moves(alive):
            assert left[new] == 0
            left[new], left[old] = left[old], 0
        assert not any(left[schedule.used :])
    assert sorted(seen) == list(range(len(lengths)))
    assert decoded.total() == sum(lengths) - len(lengths)
    return steps, decoded


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("count", "slots"), [(32, 32), (64, 64), (64, 24), (256, 64), (256, 256)])
def test_on_a_gpu_at_most_15_percent_of_the_slots_wait(name, count, slots):
    all_steps = all_decoded = 0
    for seed in range(6):
        rng = random.Random(seed)
        lengths = [LENGTHS[name](rng) for _ in range(count)]
        steps, decoded = run(lengths, slots, True, max(lengths))
        assert all(used in BUCKETS for used in steps)
        del steps[BUCKETS[0]]  # these take the time of reading the weights, however many slots wait
        all_steps += sum(used * times for used, times in steps.items())
        all_decoded += sum(decoded[used] for used in steps)
    assert 0 < 1 - all_decoded / all_steps <= 0.15


def test_sequences_of_one_length_wait_for_nothing():
    for on_gpu in (True, False):
        assert run([53] * 60, 60, on_gpu, 53) == ({60: 52}, {60: 60 * 52})
        assert run([1] * 9, 4, on_gpu, 1)[1].total() == 0


def test_on_a_cpu_no_slot_is_kept_for_a_captured_step():
    rng = random.Random(0)
    lengths = [rng.randint(1, 40) for _ in range(50)]
    steps, _ = run(lengths, 13, False, 40)
    assert max(steps) == 13
    assert not set(steps) <= set(BUCKETS)


def test_a_turn_that_continues_gets_a_slot_again():
    schedule = SlotSchedule(20, 20, True)
    assert len(schedule.take(5)) == 20
    assert schedule.moves([2, 15]) == [(15, 0)]
    assert schedule.used == 8
    schedule.wait(list(range(10)), alive=2)
    assert schedule.used == 12
    assert schedule.moves([0, 2]) == []
    assert schedule.take(5) == [(row, slot) for row, slot in enumerate([1, *range(3, 12)])]
