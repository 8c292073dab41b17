"""`SlotSchedule`: which sequences decode in which slots, and for how many steps. In: how many there are. Out:
rows to prefill and their slots, steps to take, moves between slots.

A step costs its slots, whether their sequences run or have ended. So the slot of a finished sequence goes to
the next waiting one (continuous batching), and when none waits, running ones move into fewer slots.
"""

from __future__ import annotations

BUCKETS = (8, 12, 16, 20, 24, 28, *(size << octave for octave in range(7) for size in (32, 40, 48, 56)))
"""Numbers of slots of a captured step. With fewer than the first, reading the weights takes all the time."""
STRIDE = 8  # steps on a GPU between checks for finished sequences
REFILL = 0.125  # share of the slots that must be free before new prompts are prefilled
FEWER_ON_CPU = 0.75  # running sequences move together when they need at most this share of the slots


def bucket(count: int, on_gpu: bool) -> int:
    """Slots of a step for this many sequences: on a GPU one of a few numbers, each of which has a graph."""
    if not on_gpu:
        return count
    return next((size for size in BUCKETS if size >= count), count)


class SlotSchedule:
    """The schedule of one `generate` call. It knows counts and places, no tensors."""

    def __init__(self, rows: int, slots: int, on_gpu: bool):
        """
        Args:
            rows: sequences to sample, all waiting.
            slots: how many there are.
        """
        self.slots = slots
        self.on_gpu = on_gpu
        self.waiting = list(range(rows))
        self.used = self._bucket(rows)
        """The first slots, of which every step takes all."""
        self._free = list(range(self.used))
        self._left = 0  # steps until the newest sequence has reached its limit

    def _bucket(self, count: int) -> int:
        return min(self.slots, bucket(min(count, self.slots), self.on_gpu))

    def take(self, limit: int) -> list[tuple[int, int]]:
        """Waiting rows that are prefilled now, and their slots.

        Args:
            limit: most tokens of a response, of which the prefill samples the first.
        """
        count = min(len(self.waiting), len(self._free))
        taken = list(zip(self.waiting[:count], self._free[:count], strict=True))
        self.waiting, self._free = self.waiting[count:], self._free[count:]
        if taken:
            self._left = limit - 1
        return taken

    @property
    def steps(self) -> int:
        """Steps until the next look at what has ended."""
        return min(STRIDE, self._left) if self.on_gpu else 1

    def stepped(self, steps: int) -> None:
        self._left -= steps

    def wait(self, rows: list[int], alive: int) -> None:
        """Rows that want a slot again, for another turn, while others run."""
        self.waiting += rows
        self.used = max(self.used, self._bucket(alive + len(self.waiting)))

    def moves(self, alive: list[int]) -> list[tuple[int, int]]:
        """From which slots to which others the running sequences move, now that these slots run. The steps
        after it take the slots that are left."""
        if self.waiting:
            idle = sorted(set(range(self.used)) - set(alive))
            self._free = idle if len(idle) >= REFILL * self.used or not alive else []
            return []
        fewer = self._bucket(len(alive))
        if fewer >= self.used or not (self.on_gpu or fewer <= FEWER_ON_CPU * self.used):
            return []
        self.used = fewer
        holes = sorted(set(range(fewer)) - set(alive))
        return list(zip([slot for slot in alive if slot >= fewer], holes, strict=False))
