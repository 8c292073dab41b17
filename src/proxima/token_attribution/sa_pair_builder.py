"""Builds state-action pairs: from a rollout as columns; from pieces of text; and token ids for pairs that
came as dicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from proxima.core.encoding import encode_prompts, pad_left
from proxima.core.pairs import SAPairs, as_pairs
from proxima.core.sampling import sequence_keys
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Rollout, Tokens


def pairs_from_rollout(rollout: Rollout) -> SAPairs:
    return SAPairs(rollout.tokens.mask, rollout.columns, rollout.tokens)


def pairs_from_pieces(
    prompt: str, pieces: Sequence[tuple[str, int | None]], logprobs: Sequence[float]
) -> SAPairs:
    """One sequence from its pieces of text and one log-probability a piece."""
    if len(pieces) != len(logprobs):
        raise ValueError(f"the text has {len(pieces)} tokens but there are {len(logprobs)} log-probabilities")
    state, dicts = prompt, []
    for position, ((piece, token), logprob) in enumerate(zip(pieces, logprobs, strict=True)):
        place = {"sequence": 0, "position": position} | ({} if token is None else {"action_id": token})
        dicts.append(
            {"state": state, "action": piece, "logprob_policy": logprob, "logprob_ref": None, **place}
        )
        state += piece
    return as_pairs(dicts)


def ensure_tokens(pairs: SAPairs, tokenizer: Tokenizer, device: torch.device) -> SAPairs:
    """Give pairs that came as plain dicts their token ids: the first state is the prompt, each action one
    token."""
    if pairs.tokens is not None:
        return pairs
    places = pairs.mask.nonzero().tolist()
    order = {tuple(cell): i for i, cell in enumerate(pairs.cells.tolist())}
    prompts = [pairs[order[row, 0]]["state"] for row in range(pairs.batch_size)]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"sequence {row} starts from an empty state; the models need at least one token before an "
                "action"
            )
    rows = encode_prompts(tokenizer, prompts)
    prompt_ids, prompt_mask = pad_left(rows, tokenizer.pad_token_id)
    response_ids = torch.zeros(pairs.mask.shape, dtype=torch.long)
    for row, position in places:
        response_ids[row, position] = _action_id(pairs[order[row, position]], tokenizer)
    tokens = Tokens(
        prompts=prompts,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids,
        mask=pairs.mask,
        ended=torch.zeros(pairs.batch_size, dtype=torch.bool),
        truncated=torch.zeros(pairs.batch_size, dtype=torch.bool),
        keys=sequence_keys(rows),
        tokenizer=tokenizer,
    ).map(lambda tensor: tensor.to(device))
    return SAPairs(tokens.mask, {name: column.to(device) for name, column in pairs.columns.items()}, tokens)


def _action_id(pair: Any, tokenizer: Tokenizer) -> int:
    if pair.get("action_id") is not None:
        return int(pair["action_id"])
    ids = tokenizer(pair["action"], add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"the action {pair['action']!r} is {len(ids)} tokens; give its `action_id`")
    return ids[0]
