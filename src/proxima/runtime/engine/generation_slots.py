"""The buffers of generation: `Slots` (running sequences and their KV cache) and `Outputs` (what was sampled).

Both keep their addresses from step to step, so that a step can be a CUDA graph. C slots, S cache tokens, B
prompts, R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proxima.core.sampling import Sampling, kept_shape
from proxima.core.transcript import Transcript
from proxima.core.types import KeptSet, Tokens
from proxima.runtime.engine.decoder import Decoder
from proxima.runtime.engine.expert_record import ExpertRecord

Drawn = tuple[Tensor, Tensor, KeptSet | None]
"""Sampled tokens (n,), their log-probabilities and their kept sets."""


@dataclass
class Slots:
    """The state of decoding; a step uses the first `n` slots."""

    tokens: Tensor  # (C,) last token of each sequence
    lengths: Tensor  # (C,) int32, tokens in its cache; 0 once the sequence has ended
    columns: Tensor  # (C,) response tokens written
    rows: Tensor  # (C,) row of the batch
    lanes: Tensor  # (C, 2) hash of seed, step and sequence
    running: Tensor  # (C,) bool
    limits: Tensor  # (C,) column before which its turn must end
    keys: list[Tensor]  # per layer: (C, S, Hkv, D)
    values: list[Tensor]
    starts: Tensor  # (2, C + 1) int32
    base: Tensor  # (C,) first cache position of each slot

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def size(self) -> int:
        return self.keys[0].shape[1]

    def per_slot(self) -> list[Tensor]:
        return [self.tokens, self.lengths, self.columns, self.rows, self.lanes, self.running, self.limits]

    def reset(self, unused_row: int) -> None:
        """Empty all slots. `unused_row` is the output row that is never read."""
        self._empty(0, unused_row)

    def move(self, moves: list[tuple[int, int]], count: int, unused_row: int) -> None:
        """Move running sequences from slots to others; those from `count` on are empty afterwards."""
        if moves:
            old, new = torch.tensor(moves, device=self.tokens.device).unbind(1)
            for buffer in (*self.per_slot(), *self.keys, *self.values):
                buffer[new] = buffer[old]
        self._empty(count, unused_row)

    def _empty(self, first: int, unused_row: int) -> None:
        self.running[first:] = False
        self.lengths[first:] = 0  # a step reads none of the cache
        self.rows[first:] = unused_row


def new_slots(count: int, size: int, decoder: Decoder, device: torch.device) -> Slots:
    shape, dtype = decoder.shape, decoder.weight.dtype

    def cache() -> list[Tensor]:
        return [
            torch.zeros(count, size, shape.kv_heads, shape.head_size, dtype=dtype, device=device)
            for _ in decoder.blocks
        ]

    longs = [torch.zeros(count, dtype=torch.long, device=device) for _ in range(4)]
    places = torch.arange(count + 1, device=device, dtype=torch.int32)
    return Slots(
        tokens=longs[0],
        lengths=torch.zeros(count, dtype=torch.int32, device=device),
        columns=longs[1],
        rows=longs[2],
        lanes=torch.zeros(count, 2, dtype=torch.long, device=device),
        running=torch.zeros(count, dtype=torch.bool, device=device),
        limits=longs[3],
        keys=cache(),
        values=cache(),
        starts=torch.stack([places, places * size]),
        base=torch.arange(count, device=device) * size,
    )


@dataclass
class Outputs:
    """What was sampled: one row per prompt, and one more for what is never read."""

    ids: Tensor  # (B + 1, R)
    logprobs: Tensor  # (B + 1, R) float32, by the engine's own arithmetic
    kept: KeptSet | None
    eos: Tensor  # (E,) ids that end a response; here because a graph reads them in place
    experts: ExpertRecord | None  # None where a layer has one MLP

    def parts(self) -> list[Tensor]:
        kept = (
            []
            if self.kept is None
            else [part for part in (self.kept.ids, self.kept.bits) if part is not None]
        )
        return [self.ids, self.logprobs, *kept, *([] if self.experts is None else [self.experts.experts])]

    def reset(self) -> None:
        for part in self.parts():
            part.fill_(-1 if part.dtype == torch.int32 else 0)
        if self.experts is not None:
            self.experts.reset()

    def write(self, drawn: Drawn, rows: Tensor, columns: Tensor, running: Tensor, limits: Tensor) -> Tensor:
        """Write what was sampled for running sequences; returns which of them continue."""
        token, logprob, kept = drawn
        responses = self.ids.shape[1]
        nowhere = self.ids.numel() - 1  # in the last row
        place = torch.where(running, rows * responses + columns, nowhere)
        self.ids.view(-1).index_copy_(0, place, token)
        self.logprobs.view(-1).index_copy_(0, place, logprob)
        if kept is not None and self.kept is not None:
            for buffer, part in ((self.kept.ids, kept.ids), (self.kept.bits, kept.bits)):
                if buffer is not None and part is not None:
                    buffer.flatten(0, 1).index_copy_(0, place, part.squeeze(1))
        return running & ~(token.unsqueeze(1) == self.eos).any(1) & (columns + 1 < limits)

    def collect_episodes(self, prompts: Tokens, transcript: Transcript) -> Tokens:
        """The batch with its episodes, trimmed to the longest."""
        ids, chosen, observed = transcript.responses()
        count, width = chosen.shape
        return replace(
            prompts,
            response_ids=ids,
            mask=chosen,
            observed=observed,
            kept=None if self.kept is None else self.kept.map(lambda part: part[:count, :width].clone()),
            sampled_logprobs=self.logprobs[:count, :width].masked_fill(~chosen, 0),
            experts=None if self.experts is None else self.experts.collect(prompts, width),
        )

    def collect(self, prompts: Tokens) -> Tokens:
        """The batch with its responses, trimmed to the longest."""
        count = len(prompts.prompts)
        ids = self.ids[:count]
        is_end = torch.isin(ids, self.eos)
        before = is_end.long().cumsum(1) - is_end.long()
        mask = before == 0  # up to and including the first EOS
        width = int(mask.sum(1).max())
        return replace(
            prompts,
            response_ids=ids[:, :width].masked_fill(~mask[:, :width], 0),
            mask=mask[:, :width].clone(),
            ended=(is_end & mask).any(1),
            kept=None if self.kept is None else self.kept.map(lambda part: part[:count, :width].clone()),
            sampled_logprobs=self.logprobs[:count, :width].masked_fill(~mask[:, :width], 0),
            experts=None if self.experts is None else self.experts.collect(prompts, width),
        )


def new_outputs(
    count: int, sampling: Sampling, vocabulary: int, device: torch.device, experts: ExpertRecord | None
) -> Outputs:
    shape = (count + 1, sampling.width)
    kept = None
    if (kept_set := kept_shape(sampling.top_k, sampling.top_p, vocabulary)) is not None:
        size, dtype = kept_set
        sets = torch.zeros(*shape, size, dtype=dtype, device=device)
        kept = KeptSet(ids=sets) if dtype == torch.int32 else KeptSet(bits=sets)
    return Outputs(
        ids=torch.zeros(*shape, dtype=torch.long, device=device),
        logprobs=torch.zeros(*shape, device=device),
        kept=kept,
        eos=torch.tensor(sampling.eos_ids, device=device, dtype=torch.long),
        experts=experts,
    )
