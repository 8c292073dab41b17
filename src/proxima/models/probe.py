"""`probe`: runs a few tokens through a network, once, to find out how it must be called.

The standard is the network called plainly: one sequence, no padding, no cache, no arguments but the ids. A
network is refused by name where no way of calling it gives the same log-probabilities, since PPO's ratios
would be meaningless.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from proxima.core.context_length import context_length
from proxima.models.passes import Decoding, Passes, accepted_arguments, logits_or_hidden, owner_of
from proxima.runtime import is_out_of_memory
from proxima.runtime.engine import Decoder, network_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

LONG = 80  # tokens of the first sequence; many layers work in chunks of 64
SHORT = 5  # tokens of the second one
DECODED = 2  # of these the tokens that are decoded one at a time
SAME = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest relative difference between two ways to compute the same logits."""
CHECKED = 16  # tokens by which the fast path is compared with the network itself
ROUNDED = {torch.float16: 0.25, torch.bfloat16: 0.25}
"""Largest relative difference of the fast path's logits in half precision; in others, as in `SAME`."""
OTHER_EXPERTS = 0.5
"""The same for a mixture in any precision: where shares are near, rounding chooses other experts."""
REFUSED = {torch.float16: 0.5, torch.bfloat16: 0.5}
"""In half precision a network is refused only for differences that rounding cannot explain."""


def refusal(network: PreTrainedModel, reason: str) -> ValueError:
    """An error that names the architecture."""
    return ValueError(
        f"the architecture {network.config.model_type} ({type(network).__name__}) cannot be trained: {reason}"
    )


@torch.no_grad()
def probe(network: PreTrainedModel) -> Passes:
    """How to call this network; raises an error that names it where no way is right."""
    long = probe_ids(network, LONG)
    rows = [long, long.flip(0)[:SHORT]]
    with _explained(network, "it does not run on token ids alone"):
        trunk, own = _find_trunk(network, rows[0])
        expected = [own, _plain_logits(network, rows[1])]
    _check_shape(network, own, len(long))
    if not all(item.isfinite().any(-1).all() for item in expected):
        raise refusal(network, "its logits are not numbers")
    _check_repeatable(network, long, own)
    _check_causal(network, long, own)
    passes, noise = _scoring(network, trunk, rows, expected)
    if passes.owner is None:
        return passes
    return replace(passes, decoding=_decoding(passes, rows, expected, noise))


@torch.no_grad()
def fast_path_problem(network: PreTrainedModel, decoder: Decoder) -> str:
    """How far the decoder is from the network's own forward pass, beyond what rounding explains; empty where
    it is not. No adapter may be active."""
    ids = probe_ids(network, CHECKED)
    hidden = decoder.plain_hidden(ids)
    has_head = network.base_model is not network
    gap = _gap(network_logits(network, hidden) if has_head else hidden, _plain_logits(network, ids))
    is_mixture = any(block.experts is not None for block in decoder.blocks)
    limit = OTHER_EXPERTS if is_mixture else ROUNDED.get(network.dtype, _same(network))
    return "" if gap <= limit else f"off by {gap:.2g} of their size"


def probe_ids(network: PreTrainedModel, count: int) -> Tensor:
    """Ordinary tokens: none that the config names as special."""
    config = network.config.get_text_config()
    vocabulary = network.get_input_embeddings().weight.shape[0]
    values = {**network.config.to_dict(), **config.to_dict()}
    special = {value for name, value in values.items() if "token" in name and isinstance(value, int)}
    ordinary = [token for token in range(min(vocabulary, 4096)) if token not in special]
    if len(ordinary) < 2 * SHORT:
        raise refusal(network, f"its vocabulary of {vocabulary} tokens is too small to probe")
    limit = context_length(config) or 0
    count = min(count, limit // 2) if limit > 0 else count
    ids = [ordinary[(7 * place + place // SHORT) % len(ordinary)] for place in range(count)]
    return torch.tensor(ids, device=network.device)


def _find_trunk(network: PreTrainedModel, ids: Tensor) -> tuple[nn.Module, Tensor]:
    """The module that the network calls for hidden states (the network itself where it has no head), and the
    network's logits (T, V)."""
    inside: list[nn.Module] = []
    found: list[tuple[nn.Module, Tensor]] = []

    def enter(module: nn.Module, *_: object) -> None:
        inside.append(module)

    def leave(module: nn.Module, _: object, output: object) -> None:
        inside.pop()
        first = output[0] if isinstance(output, (tuple, dict)) and len(output) else None
        if not inside and isinstance(first, Tensor) and first.dim() == 3:
            found.append((module, first))

    parts = [module for module in network.modules() if module is not network]
    handles = [part.register_forward_pre_hook(enter) for part in parts]
    handles += [part.register_forward_hook(leave) for part in parts]
    try:
        output = _call_plainly(network, ids)
    finally:
        for handle in handles:
            handle.remove()
    if getattr(output, "logits", None) is None:
        return network, output[0][0]
    trunks = [module for module, first in found if first is not output.logits]
    if len(trunks) != 1:
        raise ValueError("its layers and its head cannot be told apart")
    return trunks[0], output.logits[0]


def _call_plainly(network: PreTrainedModel, ids: Tensor) -> ModelOutput:
    """One sequence, with no arguments but its ids."""
    return network(**accepted_arguments(network, {"input_ids": ids[None], "use_cache": False}))


def _plain_logits(network: PreTrainedModel, ids: Tensor) -> Tensor:
    return logits_or_hidden(_call_plainly(network, ids))[0]


def _check_shape(network: PreTrainedModel, own: Tensor, tokens: int) -> None:
    if own.dim() != 2 or len(own) != tokens:
        raise refusal(
            network, f"for {tokens} tokens it gives logits of shape {tuple(own.shape)}, not one row per token"
        )


def _check_repeatable(network: PreTrainedModel, ids: Tensor, own: Tensor) -> None:
    if _gap(_plain_logits(network, ids), own) > _refused(network):
        raise refusal(network, "the same tokens give other logits each time")


def _check_causal(network: PreTrainedModel, ids: Tensor, own: Tensor) -> None:
    """What it predicts at a token must not depend on later tokens."""
    changed = torch.cat([ids[:SHORT], ids[SHORT:].flip(0)])
    if _gap(_plain_logits(network, changed)[:SHORT], own[:SHORT]) <= _refused(network):
        return
    hint = ""
    if getattr(network.config, "is_decoder", None) is False:
        hint = "; set is_decoder to true in its config.json if it was trained from left to right"
    raise refusal(network, f"what it predicts at a token depends on the tokens after it{hint}")


def _scoring(
    network: PreTrainedModel, trunk: nn.Module, rows: list[Tensor], expected: list[Tensor]
) -> tuple[Passes, float]:
    """How to score a right-padded batch through hidden states and the network's head, and the error that
    rounding makes.

    Positions are given where the network takes them: from 0, or after the pad id for networks that reserve
    the positions up to it.
    """
    owner, name = (None, "") if trunk is network else owner_of(network, trunk)
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    sizes = torch.tensor([[len(row)] for row in rows], device=ids.device)
    mask = torch.arange(ids.shape[1], device=ids.device) < sizes
    gap = math.inf
    problem = ""
    pad = getattr(network.config.get_text_config(), "pad_token_id", None)
    for first_position in (0, *([] if pad is None else [pad + 1]), None):
        try:
            passes = Passes(network, trunk, owner, name, 0, expected[0].shape[-1], first_position)
            hidden = passes.hidden(ids, mask)
            logits = hidden[mask] if owner is None else passes.logits(hidden[mask])
        except Exception as error:  # a network may fail in any way
            if is_out_of_memory(error):
                raise
            problem = problem or _first_line(error)
            continue
        gap = _gap(logits, torch.cat(expected))
        if gap <= _refused(network):
            return replace(passes, width=hidden.shape[-1]), gap
    why = problem if gap == math.inf else f"off by {gap:.2g} of their size"
    raise refusal(network, f"its logits cannot be computed from its last hidden states ({why})")


def _decoding(passes: Passes, rows: list[Tensor], expected: list[Tensor], noise: float) -> Decoding:
    """The fastest way to sample that gives the network's own logits, up to rounding."""
    least = 200 * torch.finfo(passes.network.dtype).eps
    limit = min(_same(passes.network), max(least, 10 * noise))
    ways: tuple[Decoding, ...] = ("padded", "grouped")
    for way in ways:
        try:
            if _sampling_gap(replace(passes, decoding=way), rows, expected) <= limit:
                return way
        except Exception as error:  # a network may fail in any way; then the next one is tried
            if is_out_of_memory(error):
                raise
    return "whole"


def _sampling_gap(passes: Passes, rows: list[Tensor], expected: list[Tensor]) -> float:
    """How far the logits of tokens decoded one by one are from those of the whole sequences."""
    prompts = [row[:-DECODED] for row in rows]
    together = passes.decoding == "padded"
    worst = 0.0
    for group in [[0, 1]] if together else [[0], [1]]:
        widest = max(len(prompts[row]) for row in group)
        ids = torch.stack([nn.functional.pad(prompts[row], (widest - len(prompts[row]), 0)) for row in group])
        sizes = torch.tensor([[len(prompts[row])] for row in group], device=ids.device)
        mask = torch.arange(widest, device=ids.device) >= widest - sizes
        steps = passes.steps(ids, mask)
        logits = [next(steps)]
        for place in range(-DECODED, 0):
            logits.append(steps.send(torch.stack([rows[row][place] for row in group])))
        wanted = torch.stack([expected[row][-DECODED - 1 :] for row in group], 1)
        worst = max(worst, _gap(torch.stack(logits), wanted))
    return worst


def _gap(logits: Tensor, expected: Tensor) -> float:
    """Relative root-mean-square difference of two sets of logits, each centred. On the CPU: not every device
    has float64."""
    logits, expected = logits.cpu(), expected.cpu()
    real = logits.isfinite() & expected.isfinite()
    if logits.shape != expected.shape or not torch.equal(logits.isfinite(), expected.isfinite()):
        return math.inf

    def centred(numbers: Tensor) -> Tensor:
        finite = numbers.double().masked_fill(~real, 0)
        return finite - finite.sum(-1, keepdim=True) / real.sum(-1, keepdim=True)

    one = centred(logits)
    other = centred(expected)
    return float(((one - other) * real).norm() / (other * real).norm().clamp(min=1e-12))


def _same(network: PreTrainedModel) -> float:
    return SAME.get(network.dtype, 1e-3)


def _refused(network: PreTrainedModel) -> float:
    return REFUSED.get(network.dtype, _same(network))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:120]}"


@contextmanager
def _explained(network: PreTrainedModel, reason: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a network may fail in any way
        if is_out_of_memory(error):
            raise
        raise refusal(network, f"{reason} ({_first_line(error)})") from error
