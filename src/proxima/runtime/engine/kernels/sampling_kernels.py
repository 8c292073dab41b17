"""Triton kernels that sample from a whole vocabulary: `core.sampling`'s Gumbel-max, with its noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxima.core.sampling import SALTS

if TYPE_CHECKING:
    from proxima.runtime.engine.generation_slots import Outputs, Slots

BLOCK = 4096  # logits per program of the first kernel
FIRST_SALT, SECOND_SALT = tl.constexpr(SALTS[0]), tl.constexpr(SALTS[1])


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """`core.sampling.mix`: unsigned 32-bit products wrap around as its masked 64-bit ones do."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _gumbel(key, other_key, token):  # type: ignore[no-untyped-def]
    """`core.sampling.gumbel_noise`. log1p(-z) is log(y) z / (1 - y) with y = 1 - z as rounded."""
    h = _mix(_mix(token.to(tl.uint32) + key) ^ other_key)
    low = -tl.log((h.to(tl.float32) + 0.5) * 2.0**-32)
    z = ((h ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    y = 1.0 - z
    high = tl.where(y == 1.0, z, -tl.log(y) * (z / tl.where(y == 1.0, 1.0, 1.0 - y)))
    return -tl.log(tl.where(h < 0x80000000, low, high))


@triton.jit
def _draw_parts(  # type: ignore[no-untyped-def]
    logits, lanes, columns, best, places, peaks, totals, temperature, vocabulary, block: tl.constexpr
):
    """The best token of a part of one row, and the part's sum for the softmax."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.load(columns + row).to(tl.uint32)
    key = _mix(tl.load(lanes + 2 * row).to(tl.uint32) ^ _mix(column + FIRST_SALT))
    other_key = _mix(tl.load(lanes + 2 * row + 1).to(tl.uint32) ^ _mix(column + SECOND_SALT))
    at = part * block + tl.arange(0, block)
    real = at < vocabulary
    x = tl.load(logits + row * vocabulary + at, mask=real, other=float("-inf")).to(tl.float32) / temperature
    value, index = tl.max(x + _gumbel(key, other_key, at), 0, return_indices=True)
    peak = tl.max(x, 0)
    here = row * tl.num_programs(1) + part
    tl.store(best + here, value)
    tl.store(places + here, part * block + index)
    tl.store(peaks + here, peak)
    tl.store(totals + here, tl.sum(tl.exp(x - peak), 0))


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    logits, best, places, peaks, totals, tokens, logprobs, temperature, vocabulary, count, lanes: tl.constexpr
):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, lanes)
    real, at = lane < count, row * count + lane
    winner = tl.argmax(tl.load(best + at, mask=real, other=float("-inf")), 0)
    token = tl.load(places + row * count + winner)
    peak = tl.load(peaks + at, mask=real, other=float("-inf"))
    top = tl.max(peak, 0)
    total = tl.sum(tl.exp(peak - top) * tl.load(totals + at, mask=real, other=0.0), 0)
    x = tl.load(logits + row * vocabulary + token).to(tl.float32) / temperature
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, x - (top + tl.log(total)))


def sample(logits: Tensor, lanes: Tensor, columns: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens (n,) of softmax(logits / temperature), and their log-probabilities.

    Args:
        logits: (n, V).
        lanes, columns: (n, 2) and (n,), the counters of the noise.
    """
    rows, vocabulary = logits.shape
    count = triton.cdiv(vocabulary, BLOCK)
    best, peaks, totals = (logits.new_empty(rows, count, dtype=torch.float32) for _ in range(3))
    places = logits.new_empty(rows, count, dtype=torch.int32)
    tokens, logprobs = columns.new_empty(rows), logits.new_empty(rows, dtype=torch.float32)
    _draw_parts[(rows, count)](
        logits, lanes, columns, best, places, peaks, totals, temperature, vocabulary, BLOCK, num_warps=8
    )
    _draw[(rows,)](
        logits, best, places, peaks, totals, tokens, logprobs, temperature, vocabulary, count,
        triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    drawn, drawn_logprobs, tokens, lengths, columns, rows, running, ids, logprobs, eos, responses, limit, ends,
    lanes: tl.constexpr,
):  # fmt: skip
    slot, lane = tl.program_id(0), tl.arange(0, lanes)
    token, column = tl.load(drawn + slot), tl.load(columns + slot)
    going = tl.load(running + slot) != 0
    place = tl.load(rows + slot) * responses + column
    tl.store(ids + place, token, mask=going)
    tl.store(logprobs + place, tl.load(drawn_logprobs + slot), mask=going)
    is_end = tl.max((tl.load(eos + lane, mask=lane < ends, other=-1) == token).to(tl.int32), 0) > 0
    goes_on = going & (is_end == 0) & (column + 1 < limit)
    tl.store(tokens + slot, token)
    tl.store(lengths + slot, tl.where(goes_on, tl.load(lengths + slot) + 1, 0))  # none of its cache is read
    tl.store(columns + slot, column + going.to(tl.int64))
    tl.store(running + slot, goes_on)


def advance(drawn: tuple[Tensor, Tensor], slots: Slots, outputs: Outputs, limit: int) -> None:
    """Write sampled tokens (n,) and their log-probabilities to the outputs and to the first n slots, as
    `Outputs.write` and a decode step do without kept sets."""
    tokens, logprobs = drawn
    ends = len(outputs.eos)
    _advance[(len(tokens),)](
        tokens, logprobs, slots.tokens, slots.lengths, slots.columns, slots.rows, slots.running, outputs.ids,
        outputs.logprobs, outputs.eos, outputs.ids.shape[1], limit, ends, triton.next_power_of_2(max(1, ends)),
        num_warps=1,
    )  # fmt: skip
