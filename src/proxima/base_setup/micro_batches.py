"""`MicroBatches`: splits a rollout into forward passes that fit in memory, halved when memory runs out.

This only bounds memory: sums over a minibatch are the same however it is split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from proxima.config import PPOConfig
from proxima.core.linear4bit import is_quantized
from proxima.core.types import Tokens
from proxima.models import CHUNK_SHARE, Backbone, short_chunk
from proxima.runtime import free_cached_memory, is_out_of_memory
from proxima.runtime.distributed import decoder_layers
from proxima.runtime.engine import CACHED_PASSES, cut, expert_matrices

log = logging.getLogger(__name__)

Result = TypeVar("Result")

USUAL_TOKENS = 8192
"""Tokens in a pass where nobody chose a number and memory is no concern."""
SHARE = 0.4  # of the memory that weights leave: activations beside cache, logits and slack
KEPT = 0.9  # numbers kept per token for the backward pass, as a share of all maps' inputs and outputs
STEP = 256
LOGITS = 8  # float32 tables of logits, probabilities and gradients alive at once


class MicroBatches:
    """One memory budget for all passes of a trainer."""

    def __init__(self, size: int, tokens: int, minibatch: int, short: bool = False):
        """
        Args:
            size, tokens: most sequences and tokens in one pass.
            minibatch: sequences of an optimiser step; scoring passes have the same size as training ones.
            short: memory is short: logits, prefill and cache follow from the tokens of a pass.
        """
        self.size = size
        self.tokens = tokens
        self.minibatch = minibatch
        self.short = short
        self.may_halve = True  # not where other processes join every pass
        self.release: Callable[[], None] = lambda: None
        """Frees what sampling keeps: called when memory has run out."""

    @classmethod
    def of(cls, config: PPOConfig, base: Backbone | None = None) -> MicroBatches:
        """As configured; tokens that nobody chose are chosen for the base's device."""
        tokens = config.micro_batch_tokens or tokens_of_a_pass(base, config.gradient_checkpointing)
        short = base is not None and base.quantized and tokens < USUAL_TOKENS
        return cls(config.micro_batch_size, tokens, config.minibatch_size, short)

    @property
    def chunk(self) -> int | None:
        """Response tokens whose logits are in memory at once; None = the usual number."""
        return short_chunk(self.tokens) if self.short else None

    def rows(self, tokens: Tokens) -> list[Tensor]:
        """The rows of each pass, in order: as few passes as the budget allows, of about equal size, with at
        least one row each."""
        lengths = (tokens.prompt_sizes + tokens.sizes).tolist()
        if not lengths:
            return []
        count = min(len(lengths), self.minibatch)
        mean = sum(lengths) / len(lengths)
        passes = max(math.ceil(count * mean / self.tokens), math.ceil(count / self.size))
        limit = min(self.tokens, math.ceil(math.ceil(count / passes) * mean) + max(lengths) - min(lengths))
        return [torch.tensor(group) for group in cut(lengths, limit, self.size)]

    def run(self, work: Callable[[], Result], longest: int) -> Result:
        """Run `work`; when the device is out of memory, halve the budget and run all of it again."""
        while True:
            try:
                return work()
            except RuntimeError as error:
                least = not self.may_halve or self.size <= 1 or self.tokens <= longest
                if least or not is_out_of_memory(error):
                    raise
                self.size = max(1, self.size // 2)
                self.tokens = max(longest, self.tokens // 2)
            self.release()
            free_cached_memory()
            log.warning(
                "out of GPU memory: micro-batches are now %d sequences, %d tokens", self.size, self.tokens
            )


def tokens_of_a_pass(base: Backbone | None, checkpointing: bool = False) -> int:
    """Tokens in a pass where nobody chose a number: on a GPU by its memory."""
    if base is None or base.device.type != "cuda":
        return USUAL_TOKENS
    memory = torch.cuda.get_device_properties(base.device).total_memory
    return tokens_for_memory(base.network, memory, checkpointing)


def tokens_for_memory(network: PreTrainedModel, memory: int, checkpointing: bool = False) -> int:
    """Tokens whose activations fit in a device's memory beside this network.

    It depends on the device, not on what is free at the moment: the same run takes the same passes again.
    """
    layers, weights = decoder_layers(network), list(network.parameters())
    widths = [
        part.in_features + part.out_features if isinstance(part, nn.Linear) else sum(part.weight.shape)
        for layer in layers
        for name, part in layer.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and ".lora_" not in name
    ]
    used = getattr(network.config.get_text_config(), "num_experts_per_tok", None) or 1
    widths += [used * sum(weight.shape[1:]) for weight in expert_matrices(network).values()]
    held = sum(weight.numel() * weight.element_size() for weight in weights)
    kept = KEPT * sum(widths) * network.dtype.itemsize
    if checkpointing:  # each layer's input, and one layer's backward pass
        kept *= 4 / max(4, len(layers))
    if is_quantized(network):
        kept += _bytes_beside(network)
    fitting = int(SHARE * max(0, memory - held) / max(1.0, kept))
    return min(USUAL_TOKENS, max(STEP, fitting // STEP * STEP))


def _bytes_beside(network: PreTrainedModel) -> float:
    """Logits and cache per token of a pass, where both follow from its tokens."""
    config = network.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * heads * size * network.dtype.itemsize
    return 4 * LOGITS * config.vocab_size / CHUNK_SHARE + CACHED_PASSES * cached
