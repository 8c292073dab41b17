"""`SAPairs`: columns of shape (B, R) that read as a list of dicts, one a generated token. In: columns. Out:
columns, or dicts.

pairs[3]["state"]      text before the token, decoded only when asked
pairs[3]["advantage"]  one number
pairs.column("kl")     the whole (B, R) tensor
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from proxima.core.sampling import sequence_keys
from proxima.core.types import Tokens, pad_to

COLUMNS = ("logprob_policy", "logprob_ref", "kl", "reward", "value", "td_error", "advantage", "return")
"""The numbers of a pair, in the order in which the stages add them. Other float columns may follow."""

PLACE = ("sequence", "position", "action_id")

ADDED_BY = {
    "logprob_policy": "SequenceGenerator.generate_sequences",
    "logprob_ref": "SequenceGenerator.generate_sequences",
    "kl": "KLDivergence().add_kl_to_sa_pairs",
    "reward": "RewardAdjuster().adjust_rewards_with_kl",
    "value": "ValueAdder.add_values_to_sa_pairs",
    "td_error": "TDError().compute_td_errors",
    "advantage": "GAEAdvantage().compute_gae_advantages",
    "return": "ReturnCalculator().add_reward_to_go",
}


class PairView(Mapping[str, Any]):
    """One pair, read as a dict."""

    def __init__(self, pairs: SAPairs, index: int):
        self._pairs, self._index = pairs, index

    def __getitem__(self, key: str) -> Any:
        return self._pairs.value(self._index, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs.keys())

    def __len__(self) -> int:
        return len(self._pairs.keys())

    def __repr__(self) -> str:
        return repr(dict(self))


class SAPairs(Sequence[PairView]):
    """A sequence of mapping views over columns.

    Immutable: `with_columns` returns a new object that shares the rest.
    """

    def __init__(
        self,
        mask: Tensor,
        columns: Mapping[str, Tensor],
        tokens: Tokens | None = None,
        dicts: Sequence[Mapping[str, Any]] = (),
        cells: Tensor | None = None,
    ):
        """
        Args:
            mask: (B, R) bool, True where there is a pair.
            columns: name -> (B, R) tensor; what stands off the mask has no meaning.
            tokens: the rollout behind the pairs, when there is one.
            dicts: the plain dicts behind the pairs, when they came from outside.
            cells: (N, 2) row and column of pair i, when that is not the mask's own order.
        """
        self.mask, self.columns, self.tokens, self._dicts = mask, dict(columns), tokens, dicts
        self._cells = cells
        self._lists: dict[str, list[Any]] = {}
        for name, column in self.columns.items():
            if column.shape != mask.shape:
                raise ValueError(
                    f"column {name!r} has shape {tuple(column.shape)}, the mask {tuple(mask.shape)}"
                )

    # --- as columns ---

    @property
    def batch_size(self) -> int:
        return self.mask.shape[0]

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)  # (B,)

    def column(self, name: str) -> Tensor:
        """A whole column (B, R), or an error that says which stage adds it."""
        if name not in self.columns:
            hint = f"; {ADDED_BY[name]} adds it" if name in ADDED_BY else ""
            raise ValueError(
                f"the state-action pairs have no {name!r} (they have {sorted(self.columns)}){hint}"
            )
        return self.columns[name]

    def with_columns(self, **columns: Tensor) -> SAPairs:
        return SAPairs(self.mask, {**self.columns, **columns}, self.tokens, self._dicts, self._cells)

    @property
    def cells(self) -> Tensor:
        """Row and position (N, 2) of each pair."""
        return self.mask.nonzero() if self._cells is None else self._cells

    @property
    def sequence_keys(self) -> Tensor:
        """The identity of each sequence (B,): the rollout's, or one made from the text it starts with."""
        if self.tokens is not None:
            return self.tokens.keys
        first = {
            row: str(self._dicts[i].get("state", ""))
            for i, (row, position) in enumerate(self._places)
            if position == 0
        }
        return sequence_keys([first[row].encode() for row in range(self.batch_size)])

    @property
    def sequence_sizes(self) -> Tensor:
        """Tokens of each sequence (B,), its prompt included where there is one."""
        return self.lengths if self.tokens is None else self.tokens.input_mask.sum(1)

    def select(self, rows: Tensor) -> SAPairs:
        """The sequences of these rows, cut to their own longest response."""
        tokens = None if self.tokens is None else self.tokens.select(rows)
        mask = self.mask[rows.to(self.mask.device)] if tokens is None else tokens.mask
        width = (int(mask.sum(1).max()) if tokens is None else mask.shape[1]) if len(rows) else 0
        places = {
            column.device: rows.to(column.device, non_blocking=True) for column in self.columns.values()
        }
        columns = {name: column[places[column.device]][:, :width] for name, column in self.columns.items()}
        if not self._dicts:
            return SAPairs(mask[:, :width], columns, tokens)
        new_row = {row: i for i, row in enumerate(rows.tolist())}
        kept = [i for i, (row, _) in enumerate(self._places) if row in new_row]
        cells = torch.tensor([(new_row[self._places[i][0]], self._places[i][1]) for i in kept])
        return SAPairs(mask[:, :width], columns, tokens, [self._dicts[i] for i in kept], cells)

    def map(self, function: Callable[[Tensor], Tensor]) -> SAPairs:
        """Apply a function to every tensor (to a device, to disk)."""
        tokens = None if self.tokens is None else self.tokens.map(function)
        mask = function(self.mask) if tokens is None else tokens.mask
        columns = {name: function(column) for name, column in self.columns.items()}
        return SAPairs(mask, columns, tokens, self._dicts, self._cells)

    @staticmethod
    def cat(parts: Sequence[SAPairs]) -> SAPairs:
        """Several groups of sequences under each other; they must have the same columns."""
        if len(parts) == 1:
            return parts[0]
        if len({frozenset(part.columns) for part in parts}) > 1:
            raise ValueError(
                f"cannot join pairs with different columns: {[sorted(part.columns) for part in parts]}"
            )
        if len({part.tokens is None for part in parts}) > 1:
            raise ValueError("cannot join pairs with and without token ids")
        width = max(part.mask.shape[1] for part in parts)
        columns = {
            name: torch.cat([pad_to(part.column(name), width) for part in parts]) for name in parts[0].columns
        }
        tokens = [part.tokens for part in parts if part.tokens is not None]
        if tokens:
            joined = Tokens.cat(tokens)
            return SAPairs(joined.mask, columns, joined)
        first, cells = 0, []
        for part in parts:
            cells.append(part.cells.cpu() + torch.tensor([first, 0]))
            first += part.batch_size
        mask = torch.cat([pad_to(part.mask, width) for part in parts])
        return SAPairs(
            mask, columns, None, [item for part in parts for item in part._dicts], torch.cat(cells)
        )

    # --- as a list of dicts ---

    def __len__(self) -> int:
        return int(self.mask.sum())

    @overload
    def __getitem__(self, index: int) -> PairView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PairView]: ...
    def __getitem__(self, index: int | slice) -> PairView | Sequence[PairView]:
        if isinstance(index, slice):
            return [PairView(self, i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        return PairView(self, index % len(self))

    def keys(self) -> list[str]:
        present = [name for name in COLUMNS if name in self.columns]
        present += [name for name in self.columns if name not in COLUMNS]
        if self.tokens is not None and not self._dicts:
            present = [*(name for name in COLUMNS[:2] if name not in present), *present]
            return ["state", "action", *present, *PLACE]
        given = dict.fromkeys(key for item in self._dicts for key in item if key not in present)
        return [*given, *present]

    def value(self, index: int, key: str) -> Any:
        """What pair `index` holds under `key`."""
        if key in self.columns:
            return self._list(key)[index]
        if self._dicts:
            if key not in self.keys():
                raise KeyError(key)
            return self._dicts[index].get(key)
        if self.tokens is None:
            raise KeyError(key)
        row, position = self._places[index]
        if key == "sequence":
            return row
        if key == "position":
            return position
        if key == "action_id":
            return int(self.tokens.response_ids[row, position])
        if key == "state":
            return self.tokens.prompts[row] + self._prefixes(row)[position]
        if key == "action":
            texts = self._prefixes(row)
            return texts[position + 1][len(texts[position]) :]
        if key in COLUMNS[:2]:
            return None
        raise KeyError(key)

    def to_dicts(self) -> list[dict[str, Any]]:
        return [dict(view) for view in self]

    def to_pandas(self) -> Any:
        """A DataFrame, one row a token (needs pandas)."""
        import pandas

        return pandas.DataFrame(self.to_dicts())

    def to_parquet(self, path: str | Path) -> None:
        """A Parquet file, one row a token (needs pandas and pyarrow)."""
        self.to_pandas().to_parquet(path)

    def __repr__(self) -> str:
        return f"SAPairs({len(self)} pairs of {self.batch_size} sequences, columns {sorted(self.columns)})"

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        return [(row, position) for row, position in self.cells.tolist()]

    def _list(self, name: str) -> list[Any]:
        if name not in self._lists:
            cells = self.cells.to(self.columns[name].device)
            self._lists[name] = self.columns[name][cells[:, 0], cells[:, 1]].tolist()
        return self._lists[name]

    def _prefixes(self, row: int) -> list[str]:
        """The response's text after 0, 1, 2 … tokens; bytes of an unfinished character wait for the token
        that ends it."""
        cache: dict[int, list[str]] = self.__dict__.setdefault("_prefix_cache", {})
        if row not in cache:
            assert self.tokens is not None
            ids = self.tokens.response_ids[row][self.mask[row]].tolist()
            decode = self.tokens.tokenizer.decode
            texts = [decode(ids[:count], skip_special_tokens=False) for count in range(len(ids) + 1)]
            texts[1:-1] = [text.rstrip("\ufffd") for text in texts[1:-1]]
            cache[row] = texts
        return cache[row]
