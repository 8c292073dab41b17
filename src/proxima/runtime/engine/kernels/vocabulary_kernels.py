"""Triton kernels over the vocabulary: each reads half-precision logits (M, V) once and widens them in
registers.

A program computes one row in a fixed order, so a row's numbers do not depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits that a program reads at once
NEAR = tl.constexpr(0.1)  # below it, e^d - 1 - d by its series: the difference would lose its digits


@triton.jit
def _stats(logits, ids, logprobs, normalisers, factor, vocabulary, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start_of_row, lanes = logits + row * vocabulary, tl.arange(0, block)
    peak, total = float("-inf"), 0.0
    for start in range(0, vocabulary, block):
        at = start + lanes
        x = tl.load(start_of_row + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) * factor
        higher = tl.maximum(peak, tl.max(x, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
    normaliser = peak + tl.log(total)
    chosen = tl.load(start_of_row + tl.load(ids + row)).to(tl.float32) * factor
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(normalisers + row, normaliser)


def stats(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities (M,) of ids under softmax(logits / temperature), and the logarithms of its
    normalisers."""
    rows, vocabulary = logits.shape
    logits = logits.contiguous()
    logprobs, normalisers = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    if rows:
        _stats[(rows,)](logits, ids, logprobs, normalisers, 1 / temperature, vocabulary, BLOCK, num_warps=8)
    return logprobs, normalisers


@triton.jit
def _pair(logits, others, own_normalisers, other_normalisers, kl, entropy, factor, vocabulary, block: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """KL as a sum of p (e^d - 1 - d), d = log q - log p: no term is negative, equal rows give 0."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    own, other = tl.load(own_normalisers + row), tl.load(other_normalisers + row)
    distance, spread = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
    for start in range(0, vocabulary, block):
        at = start + lanes
        real = at < vocabulary
        log_p = tl.load(logits + row * vocabulary + at, mask=real, other=float("-inf")).to(tl.float32)
        log_q = tl.load(others + row * vocabulary + at, mask=real, other=float("-inf")).to(tl.float32)
        log_p, log_q = log_p * factor - own, log_q * factor - other
        p = tl.exp(log_p)
        d = tl.where(p > 0, log_q - log_p, 0.0)
        series = p * d * d * (0.5 + d * (1 / 6 + d * (1 / 24)))
        far = tl.maximum(tl.exp(log_q) - p - p * d, 0.0)
        distance += tl.where((tl.abs(d) < NEAR) & (p > 0), series, far)
        spread -= p * tl.where(p > 0, log_p, 0.0)
    tl.store(kl + row, tl.sum(distance, 0))
    tl.store(entropy + row, tl.sum(spread, 0))


def pair(
    logits: Tensor, others: Tensor, normalisers: tuple[Tensor, Tensor], temperature: float
) -> tuple[Tensor, Tensor]:
    """KL (M,) from softmax(logits / temperature) to that of the others, and the entropy of the first.

    Args:
        normalisers: of both, as `stats` gives them.
    """
    rows, vocabulary = logits.shape
    logits, others = logits.contiguous(), others.contiguous()
    kl, entropy = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    if rows:
        _pair[(rows,)](
            logits, others, *normalisers, kl, entropy, 1 / temperature, vocabulary, BLOCK, num_warps=8
        )
    return kl, entropy


@triton.jit
def _slope(logits, ids, normalisers, weights, out, factor, vocabulary, weighted: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    real = at < vocabulary
    x = tl.load(logits + row * vocabulary + at, mask=real, other=0.0).to(tl.float32) * factor
    found = tl.where(at == tl.load(ids + row), 1.0, 0.0) - tl.exp(x - tl.load(normalisers + row))
    if weighted:
        found = found * tl.load(weights + row)
    tl.store(out + row * vocabulary + at, found.to(out.dtype.element_ty), mask=real)


def slope(
    logits: Tensor, ids: Tensor, normalisers: Tensor, temperature: float, weights: Tensor | None = None
) -> Tensor:
    """The gradient (M, V) of each row's log-probability by logits / temperature: 1 at its id, minus the
    probabilities. Times a row's weight where there are weights; otherwise it replaces the logits."""
    rows, vocabulary = logits.shape
    out = logits if weights is None else torch.empty_like(logits)
    if rows:
        _slope[(rows, triton.cdiv(vocabulary, BLOCK))](
            logits, ids, normalisers, normalisers if weights is None else weights, out, 1 / temperature,
            vocabulary, weights is not None, BLOCK, num_warps=8,
        )  # fmt: skip
    return out
