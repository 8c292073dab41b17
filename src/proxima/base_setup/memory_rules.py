"""How much of a device's memory passes and sampling take, from a network that may have no weights behind it.

A run asks for the network that it has loaded, `proxima doctor` for one on the meta device: both get the same
numbers. These depend on the device, not on what is free at the moment: the same run takes the same passes
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import nn
from transformers.pytorch_utils import Conv1D

from proxima.core.linear4bit import Linear4bit, is_quantized
from proxima.models import CHUNK_SHARE
from proxima.runtime.distributed import decoder_layers
from proxima.runtime.engine import (
    CACHED_PASSES,
    SamplingMemory,
    cache_tokens,
    expert_matrices,
    fewest_slots,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

USUAL_TOKENS = 8192
"""Tokens in a pass where nobody chose a number and memory is no concern."""
SHARE = 0.4  # of the memory that weights leave: activations beside cache, logits and slack
KEPT = 0.9  # numbers kept per token for the backward pass, as a share of all maps' inputs and outputs
STEP = 256
MOMENTS = 12  # bytes of a trained weight's gradient and two moments
TRAINED = 4  # bytes of a number where all weights train: in float32, whatever the base is
LOGITS = 8  # float32 tables of logits, probabilities and gradients alive at once


class PassSettings(Protocol):
    """The settings that bound a pass; `PPOConfig` and `FinetuningConfig` both have them."""

    micro_batch_size: int
    micro_batch_tokens: int
    gradient_checkpointing: bool
    lora_r: int


@dataclass(frozen=True)
class MemoryAtHand:
    """A device, and what there is on it beside a network's own weights."""

    device: int | None
    """Bytes of the device; None = not known."""
    on_gpu: bool
    beside: int = 0
    """Bytes of other networks' weights, of gradients and of moments."""
    adapters: int = 0
    """Bytes of the network's adapters, where they are not on it yet."""
    itemsize: int = 0
    """Bytes of a number in passes and cache; 0 = as the network has them."""


def held_bytes(network: nn.Module) -> int:
    """Bytes of all weights, the scales of 4-bit layers included."""
    weights = sum(weight.numel() * weight.element_size() for weight in network.parameters())
    packed = [module.nf4 for module in network.modules() if isinstance(module, Linear4bit)]
    return weights + sum(weight.size - weight.codes.numel() for weight in packed)


def sampling_for_memory(network: PreTrainedModel, at_hand: MemoryAtHand) -> SamplingMemory:
    """What sampling may take of a device's memory."""
    held = held_bytes(network) + at_hand.adapters + at_hand.beside
    tokens = cache_tokens(at_hand.device, held, cached_bytes(network, at_hand.itemsize))
    return SamplingMemory(tokens, fewest_slots(at_hand.on_gpu))


def tokens_for_memory(network: PreTrainedModel, at_hand: MemoryAtHand, checkpointing: bool = False) -> int:
    """Tokens of a pass where nobody chose a number: on a GPU, those whose activations fit beside this
    network."""
    if not at_hand.on_gpu or at_hand.device is None:
        return USUAL_TOKENS
    layers = decoder_layers(network)
    widths = [
        part.in_features + part.out_features if isinstance(part, nn.Linear) else sum(part.weight.shape)
        for layer in layers
        for name, part in layer.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and ".lora_" not in name
    ]
    used = getattr(network.config.get_text_config(), "num_experts_per_tok", None) or 1
    widths += [used * sum(weight.shape[1:]) for weight in expert_matrices(network).values()]
    held = held_bytes(network) + at_hand.adapters
    kept = KEPT * sum(widths) * (at_hand.itemsize or network.dtype.itemsize)
    if checkpointing:  # each layer's input, and one layer's backward pass
        kept *= 4 / max(4, len(layers))
    if is_quantized(network):
        kept += _bytes_beside(network)
    fitting = int(SHARE * max(0, at_hand.device - held) / max(1.0, kept))
    return min(USUAL_TOKENS, max(STEP, fitting // STEP * STEP))


def _bytes_beside(network: PreTrainedModel) -> float:
    """Logits and cache per token of a pass, where both follow from its tokens."""
    vocabulary = network.config.get_text_config().vocab_size
    return 4 * LOGITS * vocabulary / CHUNK_SHARE + CACHED_PASSES * cached_bytes(network)


def cached_bytes(network: PreTrainedModel, itemsize: int = 0) -> int:
    """Of a token's keys and values, in all layers; 0 where the config does not say.

    Args:
        itemsize: bytes of a number; 0 = as the network has them.
    """
    config = network.config.get_text_config()
    count, width, heads, size, layers = (
        config_number(config, name)
        for name in (
            *("num_attention_heads", "hidden_size", "num_key_value_heads"),
            *("head_dim", "num_hidden_layers"),
        )
    )
    if not count or not width or not layers:
        return 0
    numbers = 2 * layers * (heads or count) * (size or width // count)
    return numbers * (itemsize or network.dtype.itemsize)


def config_number(config: object, name: str) -> int:
    """A size of all layers alike; 0 where the architecture has none, or one for each layer."""
    try:
        value = getattr(config, name, None)
    except (ValueError, RuntimeError):  # transformers refuses to say one number where layers differ
        return 0
    return value if isinstance(value, int) else 0
