"""Builds state-action pairs from pieces of text; ids for the actions of plain dicts, which must be in the
vocabulary. A rollout needs no building: its pairs are the same storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proxima.core.encoding import encode_prompts, pad_rows
from proxima.core.pairs import SAPairs, TokenPairs, as_pairs
from proxima.core.pairs.sa_pairs import PairView
from proxima.core.sampling import sequence_keys
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import TokenColumns, Tokens


def pairs_from_pieces(
    prompt: str, pieces: Sequence[tuple[str, int | None]], logprobs: Sequence[float]
) -> SAPairs:
    """One sequence from its pieces of text and one log-probability per piece."""
    if len(pieces) != len(logprobs):
        raise ValueError(f"the text has {len(pieces)} tokens but there are {len(logprobs)} log-probabilities")
    state = prompt
    dicts = []
    for position, ((piece, token), logprob) in enumerate(zip(pieces, logprobs, strict=True)):
        place = {"sequence": 0, "position": position} | ({} if token is None else {"action_id": token})
        dicts.append(
            {"state": state, "action": piece, "logprob_policy": logprob, "logprob_ref": None, **place}
        )
        state += piece
    return as_pairs(dicts)


def ensure_tokens(pairs: SAPairs, tokenizer: Tokenizer, device: torch.device) -> TokenPairs:
    """Give pairs that came as plain dicts their token ids: the first state is the prompt, each action one
    token."""
    if isinstance(pairs, TokenPairs):
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
    prompt_ids, prompt_mask = pad_rows(rows, tokenizer.pad_token_id, left=True)
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
    )
    return TokenPairs(TokenColumns(tokens, pairs.columns)).map(lambda tensor: tensor.to(device))


def _action_id(pair: PairView, tokenizer: Tokenizer) -> int:
    if pair.get("action_id") is not None:
        return int(pair["action_id"])
    ids = tokenizer(pair["action"], add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"the action {pair['action']!r} is {len(ids)} tokens; give its `action_id`")
    return ids[0]
