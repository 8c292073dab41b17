"""The MLP of a mixture of experts. In: tokens of a layer. Out: what their experts add; which experts these
were.

A router gives each token a probability for every expert, and the likeliest few compute its MLP. Near a tie,
rounding decides which, so two passes over the same tokens may differ by far more than rounding. A `Routing`
replays the experts that were recorded when the tokens were sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear, pad

FUSED = ("gate_up_proj", "down_proj")
"""What transformers calls the weights of experts."""
HOPPER = 9  # compute capability
ALIGNED = 8  # bfloat16 numbers of 16 bytes, which grouped products need


class ExpertProjection:
    """One matrix of each expert, and the adapters on them; the product is that of the loaded adapter."""

    def __init__(self, weight: Tensor, layer: LoraLayer | None):
        """
        Args:
            weight: (E, out, in).
            layer: holds the adapters, in PEFT's form for weights of experts.
        """
        self.weight, self.layer = weight, layer
        self.adapter: str | None = None
        ranks = [] if layer is None else [len(one.weight) // len(weight) for one in layer.lora_A.values()]
        self.rank = -(-max(ranks, default=0) // ALIGNED) * ALIGNED
        count, outputs, inputs = weight.shape
        self.down = weight.new_zeros(count, self.rank, inputs, requires_grad=False)
        self.up = weight.new_zeros(count, outputs, self.rank, requires_grad=False)

    @torch.no_grad()
    def load(self, adapter: str | None) -> None:
        """Copy an adapter's current weights to where products without gradients read them."""
        here = self.layer is not None and adapter is not None and adapter in self.layer.lora_A
        self.adapter = adapter if here else None
        if here:
            for buffer, factor in zip((self.down, self.up), self._factors(), strict=True):
                buffer.copy_(factor)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """The loaded adapter's live down (E, rank, in) and up (E, out, rank) projections, scaled."""
        assert self.layer is not None
        assert self.adapter is not None
        count = len(self.weight)
        down = self.layer.lora_A[self.adapter].weight.unflatten(0, (count, -1))
        up = self.layer.lora_B[self.adapter].weight.unflatten(1, (-1, count)).permute(2, 0, 1)
        left = self.rank - down.shape[1]
        scaled = (pad(down, (0, 0, 0, left)), self.layer.scaling[self.adapter] * pad(up, (0, left)))
        one, other = (factor.to(self.weight.dtype).contiguous() for factor in scaled)
        return one, other

    def __call__(self, x: Tensor, ends: Tensor, grouped: bool) -> Tensor:
        """(S, in), the rows of expert e before `ends[e]` -> (S, out)."""
        out = _product(x, self.weight, ends, grouped)
        if self.adapter is None:
            return out
        down, up = self._factors() if torch.is_grad_enabled() else (self.down, self.up)
        return out + _product(_product(x, down, ends, grouped), up, ends, grouped)


class Experts(NamedTuple):
    """One layer's E experts, of which each token uses K."""

    up: ExpertProjection  # (E, 2 I, D), gate and up
    down: ExpertProjection  # (E, D, I)
    per_token: int  # K
    normalised: bool
    """Whether the probabilities of a token's experts are scaled to a sum of 1."""
    grouped: bool
    """Whether one kernel computes the products of all experts, without asking the device how many tokens each
    has."""

    @property
    def total(self) -> int:
        return len(self.up.weight)

    @property
    def are_adapted(self) -> bool:
        return bool(self.up.rank or self.down.rank)


@dataclass
class Routing:
    """Which experts the tokens of a pass go to."""

    recorded: Tensor | None = None
    """(N, L, K) to be replayed; numbers from E on mean that nothing is recorded."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """By layer (N, K), or (M, K) where a layer computes only the positions that are read."""

    def choose(self, layer: int, probabilities: Tensor, per_token: int, read: Tensor | None) -> Tensor:
        """The experts (N, K) of tokens whose router gives (N, E); where a layer is computed again for its
        backward pass, the same."""
        if layer in self.chosen:
            return self.chosen[layer]
        experts = likeliest(probabilities, per_token)
        if self.recorded is not None:
            recorded = self.recorded[:, layer] if read is None else self.recorded[read, layer]
            experts = torch.where(recorded < probabilities.shape[1], recorded.long(), experts)
        self.chosen[layer] = experts
        return experts


def likeliest(probabilities: Tensor, count: int) -> Tensor:
    return probabilities.topk(count, -1).indices


def experts_output(
    x: Tensor, experts: Experts, shares: Tensor, chosen: Tensor, activate: Callable[[Tensor], Tensor]
) -> Tensor:
    """(N, D) -> (N, D). Tokens are sorted by expert, so that each expert has one product of matrices.

    Args:
        shares: (N, E) router probabilities.
        chosen: (N, K) experts.
        activate: the inside of an expert, (S, 2 I) -> (S, I).
    """
    grouped, count = experts.grouped, experts.per_token
    numbers, order = chosen.flatten().sort(stable=True)  # (S,), S = N K
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    every = torch.arange(shares.shape[1], device=x.device)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    inside = activate(experts.up(_Moved.apply(x, order, places, count), ends, grouped))
    out = _Moved.apply(experts.down(inside, ends, grouped), places, order, 1).view(len(x), count, -1)
    own = shares.gather(1, chosen)
    if experts.normalised:
        own = own / own.sum(-1, keepdim=True)
    return (out * own.to(x.dtype).unsqueeze(-1)).sum(1)


def can_group(*weights: Tensor) -> bool:
    """Whether grouped products run on these weights (E, out, in). Only on Hopper: on most other GPUs torch
    reads the sizes of the groups back, which no graph can capture, and on Blackwell the gradient of an expert
    without tokens was reported to be wrong."""
    return all(
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(weight.device)[0] == HOPPER
        and not any(size % ALIGNED for size in weight.shape[1:])
        for weight in weights
    )


def expert_matrices(network: nn.Module) -> dict[str, nn.Parameter]:
    """The fused weights (E, out, in) of all experts of any architecture, by name."""
    return {
        name: weight
        for name, weight in network.named_parameters()
        if weight.dim() == 3 and name.split(".")[-1] in FUSED
    }


def _product(x: Tensor, weights: Tensor, ends: Tensor, grouped: bool) -> Tensor:
    """(S, in), the rows of expert e before `ends[e]`, by (E, out, in) -> (S, out)."""
    if grouped:
        return grouped_mm(x, weights.transpose(1, 2), offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(x.split(sizes), weights.unbind(), strict=True)
    return torch.cat([linear(part, weight) for part, weight in parts])


class _Moved(torch.autograd.Function):
    """Rows in another order, each of them `copies` times; the backward pass sums a row's copies in a fixed
    order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.copies = copies
        return x[order // copies if copies > 1 else order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        moved = gradients[0][places]
        moved = moved if ctx.copies == 1 else moved.unflatten(0, (-1, ctx.copies)).sum(1)
        return moved, None, None, None
