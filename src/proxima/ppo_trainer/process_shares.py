"""Which sequences of a rollout each process has.

In: a batch that all know. Out: this process's rows; and the whole batch from all processes' rows.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from torch import Tensor

from proxima.core.episode import Episode
from proxima.core.recorded_experts import RecordedExperts
from proxima.core.types import KeptSet, Tokens, pad_to
from proxima.runtime.distributed import Processes


def own_share(tokens: Tokens, processes: Processes) -> Tokens:
    """The rows that this process computes; all where it is alone."""
    return tokens.select(processes.rows(len(tokens.prompts))) if processes.is_distributed else tokens


def join_tokens(prompts: Tokens, own: Tokens, processes: Processes) -> Tokens:
    """The whole rollout on every process.

    Args:
        prompts: the prompt side of all rows.
        own: this process's rows with their responses; a process without rows learns from the others what
            responses have.
    """
    total, width = len(prompts.prompts), processes.all_reduce_max(own.mask.shape[1])
    if not processes.all_reduce_min(int(own.kept is not None or not own.prompts)):
        own = replace(own, kept=None)  # where an engine named them to some processes only, all compute them
    listed = processes.all_reduce_max(
        0 if own.kept is None or own.kept.ids is None else own.kept.ids.shape[2]
    )
    packed = processes.all_reduce_max(
        0 if own.kept is None or own.kept.bits is None else own.kept.bits.shape[2]
    )
    sampled = processes.all_reduce_max(int(own.sampled_logprobs is not None))
    observed = processes.all_reduce_max(int(own.observed is not None))
    episodes = processes.all_gather_object([asdict(each) for each in own.episodes or ()])

    def joined(
        column: Tensor | None, fill: int = 0, *shape: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        if column is None:
            column = torch.zeros(len(own.prompts), 0, *shape, dtype=dtype, device=own.mask.device)
        if shape:
            column = torch.nn.functional.pad(column, (0, shape[0] - column.shape[2]), value=fill)
        return processes.all_gather(pad_to(column, width, fill), total)

    kept = None
    if listed:
        kept = KeptSet(ids=joined(own.kept.ids if own.kept else None, -1, listed, dtype=torch.int32))
    elif packed:
        kept = KeptSet(bits=joined(own.kept.bits if own.kept else None, 0, packed, dtype=torch.uint8))
    return replace(
        prompts,
        response_ids=joined(own.response_ids),
        mask=joined(own.mask),
        ended=processes.all_gather(own.ended, total),
        kept=kept,
        sampled_logprobs=joined(own.sampled_logprobs) if sampled else None,
        observed=joined(own.observed, dtype=torch.bool) if observed else None,
        episodes=[Episode(**each) for part in episodes for each in part] if observed else None,
        experts=_join_experts(own, total, (prompts.prompt_ids.shape[1], width), processes),
    )


def _join_experts(
    own: Tokens, total: int, columns: tuple[int, int], processes: Processes
) -> RecordedExperts | None:
    """The experts of all rows, padded to `columns` of prompts and responses; None where a process recorded
    none."""
    here = own.experts
    layers = processes.all_reduce_max(0 if here is None else here.prompt.shape[2])
    if not layers or not processes.all_reduce_min(int(here is not None or not own.prompts)):
        return None
    per_token = processes.all_reduce_max(0 if here is None else here.prompt.shape[3])
    size = processes.all_reduce_max(0 if here is None else here.prompt.element_size())
    if here is None:
        dtype = torch.uint8 if size == 1 else torch.int16
        empty = torch.zeros(0, 0, layers, per_token, dtype=dtype, device=own.mask.device)
        here = RecordedExperts(empty, empty)

    def gathered(part: Tensor) -> Tensor:  # as bytes, which every backend sends
        return processes.all_gather(part.contiguous().view(torch.uint8), total).view(part.dtype)

    return here.resized(*columns).map(gathered)
