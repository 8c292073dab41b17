"""Pairs from plain dicts, at the door of every phase. In: `list[dict]`, or pairs already. Out: `SAPairs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral
from typing import overload

import torch
from torch import Tensor

from proxima.core.json_record import RecordView
from proxima.core.pairs.sa_pairs import COLUMNS, PairsLike, SAPairs, TokenPairs
from proxima.core.sampling import sequence_keys
from proxima.core.types import cat_columns, check_shapes, pad_to, select_columns


class PlainPairs(SAPairs):
    """Pairs without token ids: columns (float64) over plain dicts, whose other keys they keep. The formulas
    take them; what needs token ids makes `TokenPairs` of them first (`ensure_tokens`)."""

    def __init__(
        self,
        mask: Tensor,
        columns: dict[str, Tensor],
        dicts: Sequence[RecordView] = (),
        cells: Tensor | None = None,
    ):
        """
        Args:
            dicts: the plain dicts behind the pairs.
            cells: (N, 2) row and column of pair i, when that is not the mask's own order.
        """
        check_shapes(mask, columns)
        super().__init__(mask, columns)
        self._dicts, self._cells = dicts, cells

    @property
    def cells(self) -> Tensor:
        return super().cells if self._cells is None else self._cells

    @property
    def sequence_keys(self) -> Tensor:
        """Made from the text that each sequence starts with."""
        first = {
            row: str(self._dicts[i].get("state", ""))
            for i, (row, position) in enumerate(self._places)
            if position == 0
        }
        return sequence_keys([first[row].encode() for row in range(self.batch_size)])

    @property
    def sequence_sizes(self) -> Tensor:
        return self.lengths

    def with_columns(self, **columns: Tensor) -> PlainPairs:
        return PlainPairs(self.mask, {**self.columns, **columns}, self._dicts, self._cells)

    def select(self, rows: Tensor) -> PlainPairs:
        mask = self.mask[rows.to(self.mask.device)]
        width = 1 + int(mask.nonzero()[:, 1].max()) if len(rows) else 0
        columns = select_columns(self.columns, rows, width)
        new_row = {row: i for i, row in enumerate(rows.tolist())}
        chosen = [i for i, (row, _) in enumerate(self._places) if row in new_row]
        cells = torch.tensor([(new_row[self._places[i][0]], self._places[i][1]) for i in chosen])
        dicts = [self._dicts[i] for i in chosen] if self._dicts else []
        return PlainPairs(mask[:, :width], columns, dicts, cells)

    def map(self, function: Callable[[Tensor], Tensor]) -> PlainPairs:
        columns = {name: function(column) for name, column in self.columns.items()}
        return PlainPairs(function(self.mask), columns, self._dicts, self._cells)

    @classmethod
    def _cat(cls, parts: Sequence[PlainPairs]) -> PlainPairs:
        columns = cat_columns(parts)
        width = max(part.mask.shape[1] for part in parts)
        mask = torch.cat([pad_to(part.mask, width) for part in parts])
        cells = []
        first = 0
        for part in parts:
            cells.append(part.cells.cpu() + torch.tensor([first, 0]))
            first += part.batch_size
        dicts = [item for part in parts for item in part._dicts]
        return PlainPairs(mask, columns, dicts, torch.cat(cells))

    def keys(self) -> list[str]:
        names = self._column_names()
        given = dict.fromkeys(key for item in self._dicts for key in item if key not in names)
        return [*given, *names]

    def _other_value(self, index: int, key: str) -> object:
        if key not in self.keys():
            raise KeyError(key)
        return self._dicts[index].get(key)


def as_pairs(sa_pairs: PairsLike) -> SAPairs:
    """The door of every phase: pairs as they are; a plain `list[dict]` becomes columns (float64).

    Dicts may carry `sequence` and `position`; without them a new sequence starts where `state` does not
    extend the one before.
    """
    if isinstance(sa_pairs, SAPairs):
        return sa_pairs
    dicts = list(sa_pairs)
    if not dicts:
        raise ValueError("there are no state-action pairs")
    places = _places_of(dicts)
    rows = 1 + max(row for row, _ in places)
    width = 1 + max(position for _, position in places)
    cells = torch.tensor(places)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    mask[cells[:, 0], cells[:, 1]] = True
    columns = {}
    for name in COLUMNS:
        numbers = _numbers_of(name, dicts)
        if numbers is not None:
            columns[name] = torch.zeros(rows, width, dtype=torch.float64)
            columns[name][cells[:, 0], cells[:, 1]] = numbers
    return PlainPairs(mask, columns, dicts, cells)


@overload
def rejoin(sa_pairs: PairsLike, rollout: TokenPairs) -> TokenPairs: ...
@overload
def rejoin(sa_pairs: PairsLike, rollout: SAPairs) -> SAPairs: ...
def rejoin(sa_pairs: PairsLike, rollout: SAPairs) -> SAPairs:
    """Pairs as a phase returned them; plain dicts, from a phase of the user's own, get the tokens of the
    rollout that they came from."""
    pairs = as_pairs(sa_pairs)
    if isinstance(pairs, TokenPairs) or not isinstance(rollout, TokenPairs):
        return pairs
    if pairs.mask.shape != rollout.mask.shape or not torch.equal(pairs.mask, rollout.mask.cpu()):
        raise ValueError(f"a phase returned {len(pairs)} pairs that are not the {len(rollout)} it was given")
    columns = {name: column.to(rollout.mask.device, torch.float32) for name, column in pairs.columns.items()}
    return rollout.with_columns(**columns)


def _numbers_of(name: str, dicts: Sequence[RecordView]) -> Tensor | None:
    """One column of all dicts (N,); None where no dict has it."""
    values = [item.get(name) for item in dicts]
    missing = [i for i, value in enumerate(values) if value is None]
    if len(missing) == len(dicts):
        return None
    if missing:
        raise ValueError(f"pair {missing[0]} has no {name!r} while others have one")
    return torch.tensor([float(value or 0) for value in values], dtype=torch.float64)


def _places_of(dicts: Sequence[RecordView]) -> list[tuple[int, int]]:
    """Row and position of every dict."""
    named = [item.get("sequence") for item in dicts]
    if all(name is None for name in named):
        if missing := [i for i, item in enumerate(dicts) if not isinstance(item.get("state"), str)]:
            raise ValueError(f"pair {missing[0]} has neither 'sequence' nor a text 'state'")
        group = 0
        named = [0]
        for before, item in pairwise(dicts):
            extends = item["state"].startswith(before["state"]) and len(item["state"]) > len(before["state"])
            group += not extends
            named.append(group)
    elif any(name is None for name in named):
        raise ValueError(f"pair {named.index(None)} has no 'sequence' while others have one")
    members = {name: list[int]() for name in named if name is not None}
    for i, name in enumerate(named):
        members[name].append(i)
    places = [(0, 0)] * len(dicts)
    # with numbers for names, reward k belongs to sequence k, wherever it stands
    numbered = all(isinstance(name, Integral) for name in members)
    for row, name in enumerate(sorted(members) if numbered else members):
        for position, i in enumerate(_in_order(name, members[name], dicts)):
            places[i] = (row, position)
    return places


def _in_order(name: object, indices: list[int], dicts: Sequence[RecordView]) -> list[int]:
    """The dicts of one sequence by their `position`, or as they stand where none has one."""
    positions = [dicts[i].get("position") for i in indices]
    if all(position is None for position in positions):
        return indices
    if None in positions:
        raise ValueError(
            f"pair {indices[positions.index(None)]} has no 'position' while others of sequence {name!r} "
            "have one"
        )
    if len(set(positions)) != len(positions):
        raise ValueError(f"sequence {name!r} has two pairs at one position")
    return sorted(indices, key=lambda i: dicts[i]["position"])
