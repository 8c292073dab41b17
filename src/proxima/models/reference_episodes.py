"""Episodes of several turns on the reference path. In: what samples one turn of a batch. Out: whole episodes.

All rows whose replies have come take a turn together; the engine's slots have no counterpart here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from proxima.core.episode import Conversation
from proxima.core.sampling import Sampling
from proxima.core.transcript import Transcript
from proxima.core.types import KeptSet, Tokens

SampleTurn = Callable[[Tokens, Sampling, Tensor, Tensor], Tokens]
Cells = tuple[Tensor, Tensor]
"""Rows and columns (M,) in a batch's responses."""


@torch.no_grad()
def sample_episodes(
    sample_turn: SampleTurn, prompts: Tokens, sampling: Sampling, conversation: Conversation
) -> Tokens:
    """
    Args:
        sample_turn: takes prefixes, and the columns in which their turns begin and must have ended.
    """
    transcript = Transcript(prompts, sampling, conversation)
    shape = len(prompts.prompts), sampling.width
    logprobs = torch.zeros(shape, device=prompts.keys.device)
    kept: KeptSet | None = None
    rows = list(range(shape[0]))
    while rows:
        starts, (ids, mask) = transcript.starts(rows), transcript.prefixes(rows)
        prefixes = replace(prompts.select(torch.tensor(rows)), prompt_ids=ids, prompt_mask=mask)
        turns = sample_turn(prefixes, sampling, starts, transcript.limits(starts))
        here, place = turns.mask, torch.tensor(rows, device=starts.device)
        columns = starts.unsqueeze(1) + torch.arange(here.shape[1], device=starts.device)
        cells = place.unsqueeze(1).expand_as(here)[here], columns[here]
        assert turns.sampled_logprobs is not None
        logprobs[cells] = turns.sampled_logprobs[here]
        kept = _write(kept, turns, cells, shape)
        for row, own, size in zip(rows, turns.response_ids.tolist(), here.sum(1).tolist(), strict=True):
            transcript.end_turn(row, own[:size])
        rows = transcript.take_replies(wait=True)
    ids, chosen, observed = transcript.responses()
    width = chosen.shape[1]
    return replace(
        prompts,
        response_ids=ids,
        mask=chosen,
        observed=observed,
        kept=None if kept is None else kept.resized(width),
        sampled_logprobs=logprobs[:, :width],
    )


def _write(kept: KeptSet | None, turns: Tokens, cells: Cells, shape: tuple[int, int]) -> KeptSet | None:
    """The kept sets of all turns so far (B, R, ...) with those of these turns."""
    if turns.kept is None:
        return None
    if kept is None:
        kept = turns.kept.map(
            lambda part: part.new_full((*shape, part.shape[2]), -1 if part.dtype == torch.int32 else 0)
        )
    for buffer, part in ((kept.ids, turns.kept.ids), (kept.bits, turns.kept.bits)):
        if buffer is not None and part is not None:
            buffer[cells] = part[turns.mask]
    return kept
