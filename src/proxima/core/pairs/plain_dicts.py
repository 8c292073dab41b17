"""Pairs from plain dicts, at the door of every stage. In: `list[dict]`, or pairs already. Out: `SAPairs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch

from proxima.core.pairs.sa_pairs import COLUMNS, SAPairs


def as_pairs(sa_pairs: SAPairs | Iterable[Mapping[str, Any]]) -> SAPairs:
    """The door of every stage: columns as they are; a plain `list[dict]` becomes columns (float64).

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
        values = [item.get(name) for item in dicts]
        missing = [i for i, value in enumerate(values) if value is None]
        if len(missing) == len(dicts):
            continue
        if missing:
            raise ValueError(f"pair {missing[0]} has no {name!r} while others have one")
        columns[name] = torch.zeros(rows, width, dtype=torch.float64)
        columns[name][cells[:, 0], cells[:, 1]] = torch.tensor(
            [float(value or 0) for value in values], dtype=torch.float64
        )
    return SAPairs(mask, columns, dicts=dicts, cells=cells)


def rejoin(sa_pairs: SAPairs | Iterable[Mapping[str, Any]], rollout: SAPairs) -> SAPairs:
    """Pairs as a stage returned them; plain dicts, from a stage of the user's own, are put on their
    rollout again."""
    pairs = as_pairs(sa_pairs)
    if pairs.tokens is not None or rollout.tokens is None:
        return pairs
    if pairs.mask.shape != rollout.mask.shape or not torch.equal(pairs.mask, rollout.mask.cpu()):
        raise ValueError(f"a stage returned {len(pairs)} pairs that are not the {len(rollout)} it was given")
    columns = {name: column.to(rollout.mask.device, torch.float32) for name, column in pairs.columns.items()}
    return SAPairs(rollout.mask, {**rollout.columns, **columns}, rollout.tokens)


def _places_of(dicts: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Row and position of every dict."""
    named = [item.get("sequence") for item in dicts]
    if all(name is None for name in named):
        if missing := [i for i, item in enumerate(dicts) if not isinstance(item.get("state"), str)]:
            raise ValueError(f"pair {missing[0]} has neither 'sequence' nor a text 'state'")
        group, named = 0, [0]
        for before, item in pairwise(dicts):
            extends = item["state"].startswith(before["state"]) and len(item["state"]) > len(before["state"])
            group += not extends
            named.append(group)
    elif any(name is None for name in named):
        raise ValueError(f"pair {named.index(None)} has no 'sequence' while others have one")
    members: dict[Any, list[int]] = {}
    for i, name in enumerate(named):
        members.setdefault(name, []).append(i)
    places = [(0, 0)] * len(dicts)
    numbered = all(
        isinstance(name, Integral) for name in members
    )  # then reward k belongs to sequence k, wherever it stands
    for row, name in enumerate(sorted(members) if numbered else members):
        for position, i in enumerate(_in_order(name, members[name], dicts)):
            places[i] = (row, position)
    return places


def _in_order(name: Any, indices: list[int], dicts: Sequence[Mapping[str, Any]]) -> list[int]:
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
