"""Log-probabilities, KL and entropy over the vocabulary, from packed logits (M, V).

Half-precision logits on a GPU go through kernels that read them once; all others through `core.sampling`.
Scoring and training both call this module, so the first minibatch's ratio is exactly 1.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from proxima.core import sampling
from proxima.core.errors import first_line
from proxima.core.ops import at_least_float32, entropy
from proxima.core.types import KeptSet

log = logging.getLogger(__name__)


def token_logprobs(logits: Tensor, ids: Tensor, kept: KeptSet | None, temperature: float) -> Tensor:
    """Log-probability (M,) of each id under softmax(logits / temperature) over its kept set (M, 1, K)."""
    if kept is None and has_kernels(logits):
        return _TokenLogprobs.apply(logits, ids, temperature)
    return sampling.token_logprobs(logits.unsqueeze(1), ids.unsqueeze(1), kept, temperature).squeeze(1)


def head_logprobs(hidden: Tensor, head: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """`token_logprobs` of hidden @ head.T without a kept set, where `has_kernels`; the head is frozen.

    A row's gradient with respect to its hidden state is its weight times a fixed direction. The forward pass
    computes that direction, so no logits are kept or computed again.
    """
    return _HeadLogprobs.apply(hidden, head, ids, temperature)


def score_tokens(
    logits: Tensor, ref_logits: Tensor, ids: Tensor, kept: KeptSet | None, temperature: float
) -> tuple[Tensor, ...]:
    """`core.sampling.score_tokens`, (M,) each."""
    if not (has_kernels(logits) and has_kernels(ref_logits)) or (kept is not None and kept.ids is None):
        three = (logits.unsqueeze(1), ref_logits.unsqueeze(1), ids.unsqueeze(1))
        return tuple(column.squeeze(1) for column in sampling.score_tokens(*three, kept, temperature))
    from proxima.runtime.engine.kernels import pair, stats

    logprobs, own = stats(logits, ids, temperature)
    ref_logprobs, other = stats(ref_logits, ids, temperature)
    kl, spread = pair(logits, ref_logits, (own, other), temperature)
    if kept is None:
        return logprobs, ref_logprobs, kl, spread, torch.zeros_like(kl)
    assert kept.ids is not None
    scaled = at_least_float32(logits.gather(1, kept.ids.squeeze(1).clamp(min=0).long())) / temperature
    places = torch.arange(scaled.shape[1], device=logits.device, dtype=torch.int32)
    acting = sampling.kept_logits(
        scaled.unsqueeze(1), KeptSet(ids=torch.where(kept.ids < 0, kept.ids, places))
    )
    mass = torch.logsumexp(acting, -1).squeeze(1)
    chosen = at_least_float32(logits.gather(1, ids.unsqueeze(1))).squeeze(1) / temperature
    return chosen - mass, ref_logprobs, kl, entropy(acting).squeeze(1), (own - mass).clamp(min=0)


def has_kernels(logits: Tensor) -> bool:
    """Whether kernels read these logits: half precision, on a GPU, where Triton works."""
    half = logits.dtype in (torch.bfloat16, torch.float16)
    return logits.is_cuda and half and kernels_run(logits.device)


@cache
def kernels_run(device: torch.device) -> bool:
    """Whether the kernels compile and run here; compiles them."""
    try:
        from proxima.runtime.engine.kernels import pair, slope, stats

        logits, ids = torch.ones(2, 32, dtype=torch.bfloat16, device=device), torch.arange(2, device=device)
        logprobs, normalisers = stats(logits, ids, 1.0)
        pair(logits, logits, (normalisers, normalisers), 1.0)
        slope(logits, ids, normalisers, 1.0, logprobs)
        slope(logits, ids, normalisers, 1.0)
        return True
    except Exception as error:  # whatever is missing: Triton, a C compiler, a writable cache
        log.warning("log-probabilities without their kernels, the run is slower: %s", first_line(error))
        return False


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        from proxima.runtime.engine.kernels import stats

        logprobs, normalisers = stats(logits, ids, temperature)
        ctx.save_for_backward(logits, ids, normalisers)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from proxima.runtime.engine.kernels import slope

        logits, ids, normalisers = ctx.saved_tensors
        weights = gradients[0] / ctx.temperature
        return slope(logits.contiguous(), ids, normalisers, ctx.temperature, weights), None, None


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, ids: Tensor, temperature: float) -> Tensor:
        from proxima.runtime.engine.kernels import slope, stats

        logits = linear(hidden, head)
        logprobs, normalisers = stats(logits, ids, temperature)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(torch.mm(slope(logits, ids, normalisers, temperature), head))
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (direction,) = ctx.saved_tensors
        weights = (gradients[0] / ctx.temperature).unsqueeze(1)
        return (weights * direction.float()).to(direction.dtype), None, None, None
