"""The functions of a layer between its matrix products: norms, heads, rotary positions, activations.

Plain torch, compiled on a GPU; `kernels/` has some of them in Triton.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu, silu

from proxima.core.errors import first_line
from proxima.runtime.engine.lora_products import Gate

log = logging.getLogger(__name__)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_new": lambda x: gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
}


class Norm(NamedTuple):
    """A layer norm, or an RMS norm where there is no bias."""

    weight: Tensor
    bias: Tensor | None
    offset: float | None = None
    """Added to the weight of an RMS norm, which is multiplied in float32; None = in the input's dtype."""


NO_NORM = Norm(torch.empty(0), None)
"""Where a layer has no norm."""


@dataclass(frozen=True)
class DecoderShape:
    """The sizes and constants of a decoder's layers."""

    heads: int
    kv_heads: int
    head_size: int
    eps: float
    scale: float
    activation: str
    norm_offset: float | None = None  # of the norms of queries and keys, see `Norm`
    residual_factor: float = 1.0  # of what attention and MLP add to the residual stream


def normalize(x: Tensor, norm: Norm, eps: float) -> Tensor:
    """Layer norm where there is a bias, nothing where there is no weight, else RMS norm in float32."""
    if not len(norm.weight):
        return x
    if norm.bias is not None:
        return layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if norm.offset is not None:
        return (scaled * (norm.offset + norm.weight.float())).to(x.dtype)
    return norm.weight * scaled.to(x.dtype)


def first_norm(x: Tensor, norm: Norm, padding: int, eps: float) -> Tensor:
    """(N, D) -> normalised (N, D + padding); an adapter's inner values go into the padding."""
    normed = normalize(x, norm, eps)
    return torch.cat([normed, normed.new_zeros(len(x), padding)], -1) if padding else normed


def add_and_norm(x: Tensor, change: Tensor, norm: Norm, padding: int, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after adding a change, and its norm as `first_norm` gives it."""
    x = x + change
    return x, first_norm(x, norm, padding, eps)


def add_then_norm(norm_function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The same in two steps, for training: the backward pass keeps only the sum, not both addends."""

    def both(x: Tensor, change: Tensor, norm: Norm, padding: int, eps: float) -> tuple[Tensor, Tensor]:
        x = x + change
        return x, norm_function(x, norm, padding, eps)

    return both


def split_heads(
    qkv: Tensor, sizes: tuple[int, ...], q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, shape: DecoderShape,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(N, q + k + v) -> queries (N, H, D), keys and values (N, Hkv, D); normalised and rotated where the
    architecture does so."""
    counts = [size // shape.head_size for size in sizes]
    if q_norm is not None and k_norm is not None and len(q_norm) > shape.head_size:  # over all heads
        q, k, v = qkv.split(sizes, -1)
        q, k = _normalize_heads(q, q_norm, shape), _normalize_heads(k, k_norm, shape)
        qkv = torch.cat((q, k, v), -1)
        q_norm = None
        k_norm = None
    heads = qkv.unflatten(-1, (-1, shape.head_size))
    turned, v = heads.split((counts[0] + counts[1], counts[2]), 1)  # queries and keys: half the calls
    if q_norm is not None and k_norm is not None:
        weights = torch.cat((q_norm.expand(counts[0], -1), k_norm.expand(counts[1], -1)))
        turned = normalize(turned, Norm(weights, None, shape.norm_offset), shape.eps)
    if cos is not None and sin is not None:
        turned = rotate(turned, cos, sin)
    q, k = turned.split(counts[:2], 1)
    return q, k, v


def _normalize_heads(x: Tensor, weight: Tensor, shape: DecoderShape) -> Tensor:
    """RMS norm of (N, H * D), of groups of as many values as there are weights: one head, or all."""
    grouped = x.unflatten(-1, (-1, len(weight)))
    return normalize(grouped, Norm(weight, None, shape.norm_offset), shape.eps).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (N, H, D) with (N, D) angles, or with fewer for the first values alone."""
    if cos.shape[-1] < x.shape[-1]:
        turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
        return torch.cat((rotate(turned, cos, sin), rest), -1)
    first, second = x.chunk(2, -1)
    return (x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)).to(x.dtype)


def activate(wide: Tensor, sizes: tuple[int, ...], activation: str) -> Tensor:
    """The inside of the MLP: activation(gate) * up, or the activation alone."""
    if len(sizes) == 1:
        return ACTIVATIONS[activation](wide)
    gate, up = wide.split(sizes, -1)
    inside = ACTIVATIONS[activation](gate)
    return inside * up if torch.is_grad_enabled() else inside.mul_(up)


class Functions(NamedTuple):
    """The four functions: plain, compiled, or kernels that give the same."""

    first_norm: Callable[..., Tensor] = first_norm
    add_and_norm: Callable[..., tuple[Tensor, Tensor]] = add_and_norm
    split_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = split_heads
    activate: Callable[..., Tensor] = activate
    gate: Gate | None = None  # replaces `activate`, fused with the product after it

    def compiled(self, dynamic: bool) -> Functions:
        """The same, compiled. Backward passes recompute what lies between a function's inputs and outputs:
        that is cheap, memory is not."""
        torch._functorch.config.activation_memory_budget = 0.0
        # torch reports its own choice; there is nothing to fix
        warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
        made: list[Any] = [torch.compile(_copy_of(function), dynamic=dynamic) for function in self[:4]]
        return Functions(*made)


def kernel_functions(shape: DecoderShape, device: torch.device) -> tuple[Functions, Functions] | None:
    """Triton kernels for all of them, for sampling and for training, where they run and support the shape;
    for frozen weights, RMS norms and gated MLPs. Nothing needs compiling by torch then."""
    try:
        from proxima.runtime.engine.kernels import gate_kernels, head_kernels, norm_kernels

        if not head_kernels.fits(shape):
            return None
        x = torch.ones(2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        with torch.enable_grad():
            made = norm_kernels.add_and_rms_norm(x, x, Norm(x.detach()[0], None), 8, shape.eps)
            (made[0].sum() + made[1][:, :16].sum()).backward()
    except Exception as error:  # whatever is missing: Triton, a C compiler, a writable cache
        log.warning("norms without their kernels, the run is slower: %s", first_line(error))
        return None
    norms = (norm_kernels.first_rms_norm, norm_kernels.add_and_rms_norm, head_kernels.split_heads)
    gate = Gate(gate_kernels.padded_gate, gate_kernels.gate_backward)
    return Functions(*norms, gate_kernels.gate, gate), Functions(*norms, gate=gate)


def with_gate_kernel(functions: Functions) -> Functions:
    """The same with the Triton kernels of gated MLPs, where Triton is installed; for frozen weights."""
    try:
        from proxima.runtime.engine.kernels import gate_kernels
    except ImportError:
        return functions
    return functions._replace(gate=Gate(gate_kernels.padded_gate, gate_kernels.gate_backward))


COMPILED_FROM = 100_000_000
"""Parameters. Compiling takes about 40 s at the start of a run, and what it saves grows with layers x
width. Estimated from the time of the norms in a step at 0.6 B parameters (docs/performance.md): a few
tenths of a second per step there, about a tenth at 100 M, which 400 steps repay, and a few milliseconds at
1 M."""


def worth_compiling(parameters: int) -> bool:
    """Whether a network of this size is likely to regain in one run what compiling costs at its start."""
    return parameters >= COMPILED_FROM


def can_compile(device: torch.device) -> bool:
    """Whether torch can compile here; if not, one warning says why."""
    try:
        torch.compile(_probe, dynamic=False)(torch.ones(8, device=device))
        return True
    except Exception as error:  # whatever is missing: Triton, a C compiler, a writable cache
        log.warning("layers are not compiled, the run is slower: %s", first_line(error))
        return False


def _probe(x: Tensor) -> Tensor:
    return 2 * x + 1


def _copy_of(function: Any) -> Callable[..., Any]:
    """The same function as another object, so that it is compiled separately, for other shapes."""
    return FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
