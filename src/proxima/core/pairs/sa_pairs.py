"""`SAPairs`: columns of shape (B, R) that read as a list of dicts, one per generated token.

pairs[3]["state"]      text before the token, decoded only when asked
pairs[3]["advantage"]  one number
pairs.column("kl")     the whole (B, R) tensor

`TokenPairs` are the pairs of a rollout: they have token ids, and all training is done on them. Pairs from
plain dicts (`proxima.core.pairs.plain_dicts`) have none; the formulas take both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from torch import Tensor

from proxima.core.json_record import Record, RecordView
from proxima.core.types import Rollout, TokenColumns, Tokens

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("logprob_policy", "logprob_ref", "kl", "reward", "value", "td_error", "advantage", "return")
"""The numbers of a pair, in the order in which the phases add them. Other float columns may follow."""

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


class PairView(RecordView):
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

    def __init__(self, mask: Tensor, columns: dict[str, Tensor]):
        """
        Args:
            mask: (B, R) bool, True where there is a pair.
            columns: name -> (B, R) tensor; what stands off the mask has no meaning.
        """
        self.mask, self.columns = mask, columns
        self._lists: dict[str, list[float]] = {}

    # --- as columns ---

    @property
    def batch_size(self) -> int:
        return self.mask.shape[0]

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)  # (B,)

    def column(self, name: str) -> Tensor:
        """A whole column (B, R), or an error that says which phase adds it."""
        if name not in self.columns:
            hint = f"; {ADDED_BY[name]} adds it" if name in ADDED_BY else ""
            raise ValueError(
                f"the state-action pairs have no {name!r} (they have {sorted(self.columns)}){hint}"
            )
        return self.columns[name]

    @property
    def cells(self) -> Tensor:
        """Row and position (N, 2) of each pair."""
        return self.mask.nonzero()

    @property
    @abstractmethod
    def sequence_keys(self) -> Tensor:
        """The identity of each sequence (B,)."""

    @property
    @abstractmethod
    def sequence_sizes(self) -> Tensor:
        """Tokens of each sequence (B,), its prompt included if there is one."""

    @abstractmethod
    def with_columns(self, **columns: Tensor) -> Self:
        """The same pairs with more columns, or other ones."""

    @abstractmethod
    def select(self, rows: Tensor) -> Self:
        """The sequences of these rows, cut to their own longest response."""

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor (to a device, to disk)."""

    @classmethod
    @abstractmethod
    def _cat(cls, parts: Sequence[Self]) -> Self: ...

    @staticmethod
    def cat(parts: Sequence[SAPairs]) -> SAPairs:
        """Several groups of sequences under each other; they must have the same columns."""
        if len(parts) == 1:
            return parts[0]
        if len({type(part) for part in parts}) > 1:
            raise ValueError("cannot join pairs with and without token ids")
        return parts[0]._cat(parts)

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

    @abstractmethod
    def keys(self) -> list[str]:
        """The keys of every pair."""

    def value(self, index: int, key: str) -> object:
        """What pair `index` holds under `key`."""
        if key not in self.columns:
            return self._other_value(index, key)
        if key not in self._lists:
            cells = self.cells.to(self.columns[key].device)
            self._lists[key] = self.columns[key][cells[:, 0], cells[:, 1]].tolist()
        return self._lists[key][index]

    @abstractmethod
    def _other_value(self, index: int, key: str) -> object:
        """What pair `index` holds under a key that is not a column, or a KeyError."""

    def to_dicts(self) -> list[Record]:
        return [dict(view) for view in self]

    def to_pandas(self) -> DataFrame:
        """A DataFrame, one row per token (needs pandas)."""
        import pandas

        return pandas.DataFrame(self.to_dicts())

    def to_parquet(self, path: str | Path) -> None:
        """A Parquet file, one row per token (needs pandas and pyarrow)."""
        self.to_pandas().to_parquet(path)

    def __repr__(self) -> str:
        return f"SAPairs({len(self)} pairs of {self.batch_size} sequences, columns {sorted(self.columns)})"

    def _column_names(self) -> list[str]:
        known = [name for name in COLUMNS if name in self.columns]
        return known + [name for name in self.columns if name not in COLUMNS]

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        return [(row, position) for row, position in self.cells.tolist()]


class TokenPairs(SAPairs):
    """The pairs of a rollout: the same storage as its `Rollout`, read by token."""

    def __init__(self, storage: TokenColumns):
        super().__init__(storage.tokens.mask, storage.columns)
        self.storage = storage

    @property
    def tokens(self) -> Tokens:
        return self.storage.tokens

    @property
    def rollout(self) -> Rollout:
        """The same, read by sequence."""
        return Rollout(self.storage)

    @property
    def sequence_keys(self) -> Tensor:
        return self.tokens.keys

    @property
    def sequence_sizes(self) -> Tensor:
        return self.tokens.input_mask.sum(1)

    def with_columns(self, **columns: Tensor) -> TokenPairs:
        return TokenPairs(self.storage.with_columns(**columns))

    def select(self, rows: Tensor) -> TokenPairs:
        return TokenPairs(self.storage.select(rows))

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenPairs:
        return TokenPairs(self.storage.map(function))

    @classmethod
    def _cat(cls, parts: Sequence[TokenPairs]) -> TokenPairs:
        return TokenPairs(TokenColumns.cat([part.storage for part in parts]))

    def keys(self) -> list[str]:
        names = self._column_names()
        missing = [name for name in COLUMNS[:2] if name not in names]
        return ["state", "action", *missing, *names, *PLACE]

    def _other_value(self, index: int, key: str) -> object:
        row, position = self._places[index]
        if key == "sequence":
            return row
        if key == "position":
            return position
        if key == "action_id":
            return self.tokens.response_rows[row][position]
        if key == "state":
            return self.tokens.prompts[row] + self.tokens.prefixes(row)[position]
        if key == "action":
            texts = self.tokens.prefixes(row)
            return texts[position + 1][len(texts[position]) :]
        if key in COLUMNS[:2]:
            return None
        raise KeyError(key)


PairsLike = SAPairs | Iterable[RecordView]
"""What every phase takes: pairs, or plain dicts."""
