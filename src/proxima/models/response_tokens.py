"""Packed response tokens: between hidden states (M, D) without padding and padded columns (B, R).

Logits are the largest tensors of all, so they are computed in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from proxima.core.types import Tokens
from proxima.runtime.engine import cells

CHUNK = 1024  # response tokens whose logits are in memory at once
CHUNK_SHARE = 8  # where memory is short: one such token for this many tokens of a pass


def short_chunk(pass_tokens: int) -> int:
    """Response tokens whose logits are in memory at once where memory is short."""
    return max(1, min(CHUNK, pass_tokens // CHUNK_SHARE))


def unpack(flat: Tensor, tokens: Tokens) -> Tensor:
    """(M, ...) numbers of chosen response tokens, as (B, R, ...), 0 on padding and holes."""
    rows, width = tokens.mask.shape
    place = cells(tokens.sizes, width, flat.device, tokens.holes)
    return (
        flat.new_zeros(rows * width, *flat.shape[1:]).index_copy(0, place, flat).unflatten(0, (rows, width))
    )


def flatten_column(column: Tensor, tokens: Tokens) -> Tensor:
    """(B, R) numbers as (M,): the inverse of `unpack`."""
    return column.flatten()[cells(tokens.sizes, tokens.mask.shape[1], column.device, tokens.holes)]


def by_chunks(
    function: Callable[..., tuple[Tensor, ...]],
    tokens: Tokens,
    *hidden: Tensor,
    recompute: bool = True,
    chunk: int | None = None,
) -> tuple[Tensor, ...]:
    """function(hidden states..., ids, kept set) -> numbers (M,) each, applied in chunks to bound memory.

    With gradients, logits are recomputed in the backward pass: at most one chunk of them is in memory.

    Args:
        recompute: False for a function that keeps no logits for its backward pass.
        chunk: response tokens whose logits are in memory at once; by default `CHUNK`. A number of your own is
            filled up with the last token, so that the bits of a token's logits do not depend on how many
            tokens share its chunk: a product of few rows may be computed in another order.
    """
    place = cells(tokens.sizes, tokens.mask.shape[1], hidden[0].device, tokens.holes)
    ids = tokens.response_ids.flatten()[place]
    kept = (
        None if tokens.kept is None else tokens.kept.map(lambda part: part.flatten(0, 1)[place].unsqueeze(1))
    )
    size = chunk or CHUNK
    whole = len(ids) <= size
    parts = []
    for start in range(0, len(ids), size):
        take = partial(_rows, start=start, size=size, full=chunk is not None)
        given = [*map(take, hidden), take(ids), None if kept is None else kept.map(take)]
        again = recompute and torch.is_grad_enabled() and not whole
        parts.append(checkpoint(function, *given, use_reentrant=False) if again else function(*given))
    return tuple(torch.cat(columns)[: len(ids)] for columns in zip(*parts, strict=True))


def _rows(part: Tensor, start: int, size: int, full: bool) -> Tensor:
    """Rows of a chunk; `full`: a short last chunk repeats its last row."""
    found = part[start : start + size]
    missing = size - len(found) if full else 0
    return torch.cat([found, found[-1:].expand(missing, *found.shape[1:])]) if missing else found
