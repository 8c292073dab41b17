"""Packed sequences: where each token lies when sequences are laid end to end without padding.

N = all real tokens of the batch, M = the positions whose hidden states are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the tokens of B sequences lie in one row of N, and which M of them are read."""

    source: Tensor  # (N,) int64, the token's index in the flattened (B, T) input
    rows: Tensor  # (N,) int64, its sequence
    positions: Tensor  # (N,) int64, its position in the sequence
    starts: Tensor  # (B + 1,) int32, where sequences begin
    read: Tensor  # (M,) int64, the positions read among the N
    tiles: Tensor  # (T, 3) int32, see `tile_table`
    lengths: tuple[int, ...]  # B, on the host

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def total(self) -> int:
        return sum(self.lengths)


def pack(
    prompts: Tensor,
    responses: Tensor | None,
    width: int,
    device: torch.device,
    read_last: bool = False,
    chosen: Tensor | None = None,
) -> Layout:
    """Prompts padded on the left to `width`, responses on the right; the position before each response token
    is read.

    Args:
        prompts: (B,) lengths, on the CPU, so that nothing here waits for the device.
        responses: the same; None for prompts alone.
        read_last: read the last token of each sequence instead.
        chosen: (B, R) bool, on the CPU: read before these response tokens alone; None = before all.
    """
    lengths = prompts if responses is None else prompts + responses
    columns = width if responses is None else width + int(responses.max())
    rows, positions, starts = _ragged(lengths)
    source = rows * columns + (width - prompts)[rows] + positions
    if responses is None or read_last:
        read = starts[1:] - 1
    else:
        which, step = _response_cells(responses, chosen)
        read = starts[which] + prompts[which] - 1 + step
    return _placed(source, rows, positions, starts, read, lengths, device)


def fill_up(layout: Layout, tokens: int, reads: int) -> Layout:
    """The layout followed by copies of its first token up to this many tokens, in sequences of padding none
    longer than its longest, and by reads of that token up to this many."""
    left = tokens - layout.total
    longest = layout.longest
    device = layout.source.device
    paddings = [min(longest, left - done) for done in range(0, left, longest)]
    rows, positions, starts = _ragged(torch.tensor(paddings, dtype=torch.long))
    lengths = (*layout.lengths, *paddings)
    parts = (rows + len(layout.lengths), positions, starts[1:] + layout.total)
    rows, positions, ends = (_send(part, device) for part in parts)
    tiles = _send(torch.from_numpy(tile_table(lengths)), device)
    return Layout(
        torch.cat([layout.source, layout.source[:1].expand(left)]),
        torch.cat([layout.rows, rows]),
        torch.cat([layout.positions, positions]),
        torch.cat([layout.starts, ends.int()]),
        torch.cat([layout.read, layout.read.new_zeros(reads - len(layout.read))]),
        tiles,
        lengths,
    )


def pack_mask(mask: Tensor) -> Layout:
    """For any padding; the last real token of each sequence is read. Waits for the device once."""
    here = mask.cpu()
    lengths = here.sum(1)
    rows, positions, starts = _ragged(lengths)
    return _placed(
        here.flatten().nonzero().flatten(), rows, positions, starts, starts[1:] - 1, lengths, mask.device
    )


def cells(responses: Tensor, width: int, device: torch.device, chosen: Tensor | None = None) -> Tensor:
    """(M,) indices of the response tokens, or of the chosen ones, in the flattened (B, width) response
    columns."""
    which, step = _response_cells(responses, chosen)
    return _send(which * width + step, device)


def _response_cells(responses: Tensor, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Row and column (M,) of each response token that is read."""
    if chosen is not None:
        which, step = chosen.nonzero(as_tuple=True)
    else:
        which, step, _ = _ragged(responses)
    return which, step


def cut(lengths: Sequence[int], tokens: int, rows: float = math.inf) -> list[list[int]]:
    """Indices of sequences, in order, in groups of at most `tokens` tokens and `rows` rows; a longer sequence
    is a group of its own."""
    groups: list[list[int]] = []
    left = 0
    for row, length in enumerate(lengths):
        if not groups or length > left or len(groups[-1]) >= rows:
            groups.append([])
            left = tokens
        groups[-1].append(row)
        left -= length
    return groups


TILE = 64  # tokens per attention tile


def tile_table(lengths: Sequence[int], rows: int = 0) -> np.ndarray:
    """(T, 3) int32: first token of a tile, where its sequence starts and ends. Tiles that attend to the most
    tokens come first.

    Args:
        rows: pad with empty tiles to this many rows.
    """
    sizes = np.asarray(lengths, dtype=np.int32)
    ends = np.cumsum(sizes, dtype=np.int32)
    counts = -(-sizes // TILE)
    which = np.repeat(np.arange(len(sizes)), counts)
    step = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (ends - sizes)[which]
    table = np.stack([starts + TILE * step, starts, ends[which]], 1).astype(np.int32)
    table = table[np.argsort(-step, kind="stable")]
    return np.concatenate([table, np.zeros((max(0, rows - len(table)), 3), dtype=np.int32)])


def _ragged(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row and position of every element, and where rows start.

    (In numpy: starting torch's threads costs more than this work.)
    """
    sizes = lengths.numpy()
    starts = np.concatenate([[0], np.cumsum(sizes)])
    rows = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.arange(len(rows)) - starts[rows]
    return torch.from_numpy(rows), torch.from_numpy(positions), torch.from_numpy(starts)


def _placed(
    source: Tensor,
    rows: Tensor,
    positions: Tensor,
    starts: Tensor,
    read: Tensor,
    lengths: Tensor,
    device: torch.device,
) -> Layout:
    tiles = torch.from_numpy(tile_table(lengths.tolist())).flatten()
    given = (source, rows, positions, read, starts, tiles)
    parts = _send(torch.cat(given), device).split([len(part) for part in given])  # one copy instead of six
    return Layout(
        parts[0],
        parts[1],
        parts[2],
        parts[4].int(),
        parts[3],
        parts[5].int().view(-1, 3),
        tuple(lengths.tolist()),
    )


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
