"""Records that go through the pipeline: the tokens of a rollout, its kept sets and the columns of numbers.

`TokenColumns` is the one storage: tokens, their mask, and the columns that phases add. It has two views:
`Rollout` indexes sequences, `proxima.core.pairs.TokenPairs` indexes tokens.
Legend used everywhere: B batch, P prompt, R response, T = P + R, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from proxima.core.chat_turns import Turn
from proxima.core.episode import Episode
from proxima.core.json_record import Record
from proxima.core.recorded_experts import RecordedExperts
from proxima.core.token_text import text_prefixes
from proxima.core.tokenizer import Tokenizer


def pad_to(tensor: Tensor, size: int, value: float = 0, left: bool = False) -> Tensor:
    """Pad dimension 1 to `size`, on the right unless `left`."""
    missing = size - tensor.shape[1]
    widths = [0, 0] * (tensor.dim() - 2) + ([missing, 0] if left else [0, missing])
    return pad(tensor, widths, value=value)


class Prompt(str):
    """A prompt that carries the other columns of its row (a reference answer, say) to the rewards that ask
    for them, the turns it was made of to the people who read it, and its messages to a chat template that
    writes it again (with tools, or with what an environment's `reset` said).

    It is the text itself, so everything that takes prompts takes it; whatever makes a new text of it drops
    all of these.
    """

    columns: dict[str, object]
    turns: list[Turn]
    messages: list[Record]

    def __new__(
        cls,
        text: str,
        columns: Mapping[str, object] | None = None,
        turns: Sequence[Turn] = (),
        messages: Sequence[Record] = (),
    ) -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.columns = dict(columns or {})
        prompt.turns = list(turns)
        prompt.messages = list(messages)
        return prompt


@dataclass(frozen=True)
class KeptSet:
    """The tokens that truncated sampling could have chosen, at each response position.

    Top-k keeps few tokens, so their ids are listed; pure top-p may keep any number, so it is one bit per
    vocabulary entry. Exactly one of the two is set. A row whose ids are all -1 (padding) keeps nothing.
    """

    ids: Tensor | None = None  # (B, R, K) int32, filled up with -1
    bits: Tensor | None = None  # (B, R, ceil(V / 8)) uint8, lowest bit first

    def map(self, function: Callable[[Tensor], Tensor]) -> KeptSet:
        return KeptSet(
            None if self.ids is None else function(self.ids),
            None if self.bits is None else function(self.bits),
        )

    def resized(self, responses: int, choices: int | None = None) -> KeptSet:
        """Cut or padded to `responses` positions and, for ids, to `choices` tokens per position."""

        def fit(tensor: Tensor, value: int, width: int) -> Tensor:
            fitted = pad_to(tensor[:, :responses], responses, value)
            return pad(fitted, (0, width - fitted.shape[2]), value=value)

        if self.ids is not None:
            return KeptSet(ids=fit(self.ids, -1, choices or self.ids.shape[2]))
        assert self.bits is not None
        return KeptSet(bits=fit(self.bits, 0, self.bits.shape[2]))

    @staticmethod
    def cat(parts: Sequence[KeptSet], responses: int) -> KeptSet:
        """Several under each other, padded to `responses` positions."""
        choices = max((part.ids.shape[2] for part in parts if part.ids is not None), default=None)
        fitted = [part.resized(responses, choices) for part in parts]
        ids = [part.ids for part in fitted if part.ids is not None]
        bits = [part.bits for part in fitted if part.bits is not None]
        if ids and bits:
            raise ValueError("cannot join rollouts sampled with top-k and with top-p alone")
        return KeptSet(ids=torch.cat(ids)) if ids else KeptSet(bits=torch.cat(bits))


@dataclass(frozen=True)
class Tokens:
    """What was read and written: prompts padded on the left, responses on the right.

    Masks decide, never the pad id. Between tokens that the policy chose there may be others, `observed`: an
    environment's words, say. They are holes of `mask`, are read like a prompt and have no numbers of their
    own; `mask` and `observed` together fill each row from its first column on.
    """

    prompts: list[str]  # B texts, as the model saw them
    prompt_ids: Tensor  # (B, P) int64
    prompt_mask: Tensor  # (B, P) bool
    response_ids: Tensor  # (B, R) int64
    mask: Tensor  # (B, R) bool, True = response token that the policy chose (EOS included)
    ended: Tensor  # (B,) bool, True = the last real token is an EOS; of an episode, that it is done
    truncated: Tensor  # (B,) bool, True = the prompt was cut on the left to fit the context
    keys: Tensor  # (B,) int64, the sequence's identity: its sample and its place in a shuffle follow from it
    tokenizer: Tokenizer  # decodes the ids
    kept: KeptSet | None = None  # None = sampled from the whole vocabulary
    sampled_logprobs: Tensor | None = None  # (B, R) float32, by the arithmetic of whatever sampled them
    observed: Tensor | None = (
        None  # (B, R) bool, response tokens that it did not choose; None = there are none
    )
    episodes: list[Episode] | None = None  # B, where an environment or tools answered
    experts: RecordedExperts | None = None  # of a mixture of experts, where the engine recorded them

    @cached_property
    def prompt_sizes(self) -> Tensor:
        """(B,) prompt tokens, on the CPU; asking for it waits for the device once."""
        return self.prompt_mask.sum(1).cpu()

    @cached_property
    def sizes(self) -> Tensor:
        """(B,) response tokens, observed ones included, on the CPU; asking for it waits for the device
        once."""
        return self.read.sum(1).cpu()

    @property
    def read(self) -> Tensor:
        """(B, R) bool, True = response token, chosen or observed."""
        return self.mask if self.observed is None else self.mask | self.observed

    @cached_property
    def holes(self) -> Tensor | None:
        """`mask` on the CPU where it has holes; None where `sizes` say it all."""
        return None if self.observed is None else self.mask.cpu()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and response."""
        return int((self.prompt_sizes + self.sizes).max())

    @property
    def input_ids(self) -> Tensor:
        return torch.cat([self.prompt_ids, self.response_ids], 1)  # (B, T)

    @property
    def input_mask(self) -> Tensor:
        return torch.cat([self.prompt_mask, self.read], 1)  # (B, T)

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """Apply a function to every tensor (to a device, to a row selection, to disk)."""
        sampled, observed = self.sampled_logprobs, self.observed
        return replace(
            self,
            prompt_ids=function(self.prompt_ids),
            prompt_mask=function(self.prompt_mask),
            response_ids=function(self.response_ids),
            mask=function(self.mask),
            ended=function(self.ended),
            truncated=function(self.truncated),
            keys=function(self.keys),
            sampled_logprobs=None if sampled is None else function(sampled),
            observed=None if observed is None else function(observed),
            kept=None if self.kept is None else self.kept.map(function),
            experts=None if self.experts is None else self.experts.map(function),
        )

    def select(self, rows: Tensor) -> Tokens:
        """Some rows, with the columns that only they leave empty cut away."""
        rows = rows.cpu()
        here = rows.to(self.mask.device, non_blocking=True)
        chosen = self.map(lambda tensor: tensor[here])
        prompt_sizes, sizes = self.prompt_sizes[rows], self.sizes[rows]
        prompts = int(prompt_sizes.max()) if len(rows) else 0
        responses = int(sizes.max()) if len(rows) else 0
        first = chosen.prompt_ids.shape[1] - prompts
        selected = replace(
            chosen,
            prompts=[self.prompts[row] for row in rows.tolist()],
            prompt_ids=chosen.prompt_ids[:, first:],
            prompt_mask=chosen.prompt_mask[:, first:],
            response_ids=chosen.response_ids[:, :responses],
            mask=chosen.mask[:, :responses],
            kept=None if chosen.kept is None else chosen.kept.resized(responses),
            sampled_logprobs=None
            if chosen.sampled_logprobs is None
            else chosen.sampled_logprobs[:, :responses],
            observed=None if chosen.observed is None else chosen.observed[:, :responses],
            episodes=None if self.episodes is None else [self.episodes[row] for row in rows.tolist()],
            experts=None if chosen.experts is None else chosen.experts.resized(prompts, responses),
        )
        decoded = {special: [texts[row] for row in rows.tolist()] for special, texts in self._decoded.items()}
        selected.__dict__.update(prompt_sizes=prompt_sizes, sizes=sizes, _decoded=decoded)
        return selected

    @staticmethod
    def cat(parts: Sequence[Tokens]) -> Tokens:
        """Several rollouts under each other, padded to the widest."""
        prompts = max(part.prompt_ids.shape[1] for part in parts)
        responses = max(part.response_ids.shape[1] for part in parts)
        sets = [part.kept for part in parts if part.kept is not None]
        if sets and len(sets) != len(parts):
            raise ValueError("cannot join rollouts sampled with and without truncation")
        return Tokens(
            prompts=[text for part in parts for text in part.prompts],
            prompt_ids=_cat_padded(parts, "prompt_ids", prompts, left=True),
            prompt_mask=_cat_padded(parts, "prompt_mask", prompts, left=True),
            response_ids=_cat_padded(parts, "response_ids", responses),
            mask=_cat_padded(parts, "mask", responses),
            ended=torch.cat([part.ended for part in parts]),
            truncated=torch.cat([part.truncated for part in parts]),
            keys=torch.cat([part.keys for part in parts]),
            kept=KeptSet.cat(sets, responses) if sets else None,
            sampled_logprobs=_cat_sampled(parts, responses),
            observed=_cat_observed(parts, responses),
            episodes=_cat_episodes(parts),
            experts=RecordedExperts.cat([part.experts for part in parts], prompts, responses),
            tokenizer=parts[0].tokenizer,
        )

    @cached_property
    def response_rows(self) -> list[list[int]]:
        """The response ids of each sequence as a plain list, observed ones included, without padding."""
        ids, mask = self.response_ids.cpu(), self.read.cpu()
        return [row[real].tolist() for row, real in zip(ids, mask, strict=True)]

    def texts(self, special: bool = False) -> list[str]:
        """The responses as text, decoded once; `special` also shows tokens such as EOS."""
        if special not in self._decoded:
            decode = self.tokenizer.decode
            self._decoded[special] = [
                decode(row, skip_special_tokens=not special) for row in self.response_rows
            ]
        return list(self._decoded[special])

    def prefixes(self, row: int) -> list[str]:
        """The text of one response after 0, 1, 2 ... tokens, decoded once."""
        if row not in self._prefixes:
            self._prefixes[row] = text_prefixes(self.response_rows[row], self.tokenizer.decode)
        return self._prefixes[row]

    @cached_property
    def _decoded(self) -> dict[bool, list[str]]:
        return {}  # by `special`

    @cached_property
    def _prefixes(self) -> dict[int, list[str]]:
        return {}  # by row


def _cat_padded(parts: Sequence[Tokens], name: str, width: int, left: bool = False) -> Tensor:
    return torch.cat([pad_to(getattr(part, name), width, left=left) for part in parts])


def _cat_episodes(parts: Sequence[Tokens]) -> list[Episode] | None:
    if any(part.episodes is None for part in parts):
        return None
    return [episode for part in parts for episode in part.episodes or ()]


def _cat_sampled(parts: Sequence[Tokens], responses: int) -> Tensor | None:
    """The log-probabilities of whatever sampled the tokens; None where a part has none."""
    sampled = [
        pad_to(part.sampled_logprobs, responses) for part in parts if part.sampled_logprobs is not None
    ]
    return torch.cat(sampled) if len(sampled) == len(parts) else None


def _cat_observed(parts: Sequence[Tokens], responses: int) -> Tensor | None:
    """The tokens that the policy did not choose; None where no part has any."""
    if all(part.observed is None for part in parts):
        return None
    columns = [torch.zeros_like(part.mask) if part.observed is None else part.observed for part in parts]
    return torch.cat([pad_to(column, responses) for column in columns])


@dataclass(frozen=True)
class TokenColumns:
    """The tokens of a batch, and one column (B, R) for each number that the phases measure of a token.

    Immutable: every method returns new storage that shares what it does not change.
    """

    tokens: Tokens
    columns: dict[str, Tensor]  # off the mask a number has no meaning

    def __post_init__(self) -> None:
        check_shapes(self.tokens.mask, self.columns)

    def with_columns(self, **columns: Tensor) -> TokenColumns:
        return TokenColumns(self.tokens, {**self.columns, **columns})

    def select(self, rows: Tensor) -> TokenColumns:
        """The sequences of these rows, cut to their own longest response."""
        tokens = self.tokens.select(rows)
        return TokenColumns(tokens, select_columns(self.columns, rows, tokens.mask.shape[1]))

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenColumns:
        """Apply a function to every tensor (to a device, to disk)."""
        tokens = self.tokens.map(function)
        return TokenColumns(tokens, {name: function(column) for name, column in self.columns.items()})

    @staticmethod
    def cat(parts: Sequence[TokenColumns]) -> TokenColumns:
        """Several batches with the same columns under each other."""
        return TokenColumns(Tokens.cat([part.tokens for part in parts]), cat_columns(parts))


def check_shapes(mask: Tensor, columns: Mapping[str, Tensor]) -> None:
    for name, column in columns.items():
        if column.shape != mask.shape:
            raise ValueError(f"column {name!r} has shape {tuple(column.shape)}, the mask {tuple(mask.shape)}")


def select_columns(columns: Mapping[str, Tensor], rows: Tensor, width: int) -> dict[str, Tensor]:
    """These rows of each column, cut to `width`; one copy of the row numbers per device."""
    places = {column.device: rows.to(column.device, non_blocking=True) for column in columns.values()}
    return {name: column[places[column.device]][:, :width] for name, column in columns.items()}


class HasColumns(Protocol):
    @property
    def columns(self) -> dict[str, Tensor]: ...


def cat_columns(parts: Sequence[HasColumns]) -> dict[str, Tensor]:
    """The columns of all parts under each other, padded to the widest; they must have the same names."""
    columns = [part.columns for part in parts]
    if len({frozenset(each) for each in columns}) > 1:
        raise ValueError(f"cannot join pairs with different columns: {[sorted(each) for each in columns]}")
    width = max((column.shape[1] for each in columns for column in each.values()), default=0)
    return {name: torch.cat([pad_to(each[name], width) for each in columns]) for name in columns[0]}


class Rollout(Sequence["Rollout"]):
    """What `SequenceGenerator.generate` returns besides the texts: tokens and log-probabilities; `rollout[i]`
    is one sequence.

    columns["logprob_policy"] (B, R)   acting policy, over the kept set, at the sampling temperature
    columns["logprob_ref"] (B, R)      reference, over the whole vocabulary, at the same temperature
    and what the scoring pass measured beside them (see `proxima.runs.metrics`).
    """

    def __init__(self, storage: TokenColumns):
        self.storage = storage

    @property
    def tokens(self) -> Tokens:
        return self.storage.tokens

    @property
    def columns(self) -> dict[str, Tensor]:
        return self.storage.columns

    def __len__(self) -> int:
        return len(self.tokens.prompts)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | Sequence[Rollout]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of a rollout of {len(self)}")
        return Rollout(self.storage.select(torch.tensor([index % len(self)])))

    @property
    def logprobs(self) -> list[list[float]]:
        """The policy's log-probabilities as plain numbers, one list per sequence."""
        column, mask = self.columns["logprob_policy"], self.tokens.mask
        return [values[real].tolist() for values, real in zip(column, mask, strict=True)]
