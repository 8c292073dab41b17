"""`MicroBatches`: splits a rollout into forward passes that fit in memory, and bounds the cache of sampling;
both are halved when memory runs out.

This only bounds memory: sums over a minibatch are the same however it is split. All passes of a step have one
capacity, which follows from its whole batch: a sequence is scored and trained by products of one size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from proxima.config import PPOConfig
from proxima.core.linear4bit import is_quantized
from proxima.core.types import Tokens
from proxima.models import CHUNK_SHARE, Backbone, short_chunk
from proxima.runtime import device_memory, free_cached_memory, is_out_of_memory
from proxima.runtime.distributed import decoder_layers
from proxima.runtime.engine import (
    CACHED_PASSES,
    PassCapacity,
    SamplingMemory,
    cache_tokens,
    cut,
    expert_matrices,
    fewest_slots,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")

USUAL_TOKENS = 8192
"""Tokens in a pass where nobody chose a number and memory is no concern."""
SHARE = 0.4  # of the memory that weights leave: activations beside cache, logits and slack
KEPT = 0.9  # numbers kept per token for the backward pass, as a share of all maps' inputs and outputs
STEP = 256
MOMENTS = 12  # bytes of a trained weight's gradient and two moments
LOGITS = 8  # float32 tables of logits, probabilities and gradients alive at once


@dataclass(frozen=True)
class PassPlan:
    """How sequences are cut into passes."""

    limit: int
    """Most tokens of several sequences in a pass."""
    capacity: PassCapacity
    """What every such pass fits."""


class MicroBatches:
    """One memory budget for all passes of a trainer."""

    def __init__(
        self,
        size: int,
        tokens: int,
        minibatch: int,
        short: bool = False,
        sampling: SamplingMemory | None = None,
    ):
        """
        Args:
            size, tokens: most sequences and tokens in one pass.
            minibatch: sequences of an optimiser step; scoring passes have the same size as training ones.
            short: memory is short: logits, prefill and cache follow from the tokens of a pass.
            sampling: the memory of sampling; by default there is no bound.
        """
        self.size = size
        self.tokens = tokens
        self.minibatch = minibatch
        self.short = short
        self._sampling = sampling or SamplingMemory(math.inf, 1)
        self.may_halve = True  # not where other processes join every pass
        self.release: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Frees what sampling keeps: called when memory has run out. Gives the slots of its cache, and tokens
        of each."""
        self._sequences: Tokens | None = None  # of the step that was planned
        self._plan: PassPlan | None = None

    @classmethod
    def of(cls, config: PPOConfig, base: Backbone | None = None, trained: int = 0) -> MicroBatches:
        """As configured; tokens that nobody chose are chosen for the base's device.

        Args:
            trained: bytes of the weights of other networks, and of gradients and moments.
        """
        tokens = config.micro_batch_tokens or tokens_of_a_pass(base, config.gradient_checkpointing)
        short = base is not None and base.quantized and tokens < USUAL_TOKENS
        sampling = None if base is None else sampling_memory(base, trained)
        return cls(config.micro_batch_size, tokens, config.minibatch_size, short, sampling)

    @property
    def sampling(self) -> SamplingMemory:
        """What bounds the memory of sampling at present."""
        if not self.short:
            return self._sampling
        cache = min(self._sampling.cache, CACHED_PASSES * self.tokens)
        return self._sampling._replace(cache=cache, prefill=self.tokens)

    @property
    def chunk(self) -> int | None:
        """Response tokens whose logits are in memory at once; None = the usual number."""
        return short_chunk(self.tokens) if self.short else None

    # --- passes ---

    def plan(self, tokens: Tokens | None, processes: int = 1) -> None:
        """From now on passes are made for a step over these sequences, or parts of them; None = the step has
        ended, and whatever is cut into rows is planned by itself.

        Args:
            processes: how many share a minibatch.
        """
        self._sequences, self._processes = tokens, processes
        self._plan = None

    @property
    def capacity(self) -> PassCapacity | None:
        """That of passes at present; None before any was cut."""
        return None if self._plan is None else self._plan.capacity

    def rows(self, tokens: Tokens) -> list[Tensor]:
        """The rows of each pass, in order: as few passes as the budget allows, of about equal size, with at
        least one row each."""
        lengths = (tokens.prompt_sizes + tokens.sizes).tolist()
        if not lengths:
            return []
        if self._sequences is None:
            self._plan = self._planned(lengths, tokens.sizes.tolist(), self.minibatch)
        elif self._plan is None:
            whole, share = self._sequences, -(-self.minibatch // self._processes)
            self._plan = self._planned(
                (whole.prompt_sizes + whole.sizes).tolist(), whole.sizes.tolist(), share
            )
        return [torch.tensor(group) for group in cut(lengths, self._plan.limit, self.size)]

    def _planned(self, lengths: Sequence[int], responses: Sequence[int], minibatch: int) -> PassPlan:
        """Passes of about equal size for minibatches of these sequences."""
        count, spread, longest = min(len(lengths), minibatch), max(lengths) - min(lengths), max(lengths)
        mean = sum(lengths) / len(lengths)
        passes = max(math.ceil(count * mean / self.tokens), math.ceil(count / self.size))
        limit = min(self.tokens, math.ceil(math.ceil(count / passes) * mean) + spread)
        most = max(longest, min(self.tokens, _coarse(limit, spread > 0)))
        tokens = _coarse(most, longest > self.tokens)
        sequences = min(self.size, len(lengths))
        reads = min(tokens, min(sequences, max(1, most // min(lengths))) * max(responses))
        return PassPlan(most, PassCapacity.of_passes(tokens, sequences, longest, reads))

    # --- lack of memory ---

    def run(self, work: Callable[[], Result], longest: int, samples: bool = False) -> Result:
        """Run `work`; when the device is out of memory, halve the budget and run all of it again.

        Args:
            samples: whether it is sampling that runs.
        """
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not (self.may_halve and is_out_of_memory(error)) or not self._halve(longest, samples):
                    raise
            free_cached_memory()

    def _halve(self, longest: int, samples: bool) -> bool:
        """Free the cache of sampling, and halve what can be halved: passes, or the cache where these cannot
        be or have no part in it; whether there was any."""
        slots, each = self.release()
        passes = self.size > 1 and self.tokens > longest and (self.short or not samples)
        cache = slots > 1 and (self.short or not passes)
        if passes:
            self.size = max(1, self.size // 2)
            self.tokens = max(longest, self.tokens // 2)
            self._plan = None
            text = "out of GPU memory: micro-batches are now %d sequences, %d tokens"
            log.warning(text, self.size, self.tokens)
        if cache:
            self._sampling = self._sampling._replace(cache=slots // 2 * each, fewest=1)
            log.warning("out of GPU memory: sampling now has %d slots of %d tokens", slots // 2, each)
        return passes or cache


def sampling_memory(base: Backbone, trained: int = 0) -> SamplingMemory:
    """What sampling may take of a device's memory beside this network.

    Args:
        trained: bytes of other weights, of gradients and of moments.
    """
    held = sum(weight.numel() * weight.element_size() for weight in base.network.parameters()) + trained
    tokens = cache_tokens(device_memory(base.device), held, _cached_bytes(base.network))
    return SamplingMemory(tokens, fewest_slots(base.device.type == "cuda"))


def _coarse(tokens: int, varies: bool) -> int:
    """Rounded up; where it varies from step to step, to one of sixteen sizes between two powers of two."""
    step = max(STEP, (1 << tokens.bit_length() - 1) // 16) if varies else STEP
    return -(-tokens // step) * step


def tokens_of_a_pass(base: Backbone | None, checkpointing: bool = False) -> int:
    """Tokens in a pass where nobody chose a number: on a GPU by its memory."""
    if base is None or base.device.type != "cuda":
        return USUAL_TOKENS
    memory = device_memory(base.device)
    return USUAL_TOKENS if memory is None else tokens_for_memory(base.network, memory, checkpointing)


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
    vocabulary = network.config.get_text_config().vocab_size
    return 4 * LOGITS * vocabulary / CHUNK_SHARE + CACHED_PASSES * _cached_bytes(network)


def _cached_bytes(network: PreTrainedModel) -> int:
    """Of a token's keys and values, in all layers; 0 where the config does not say."""
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
    return 2 * layers * (heads or count) * (size or width // count) * network.dtype.itemsize


def config_number(config: object, name: str) -> int:
    """A size of all layers alike; 0 where the architecture has none, or one for each layer."""
    try:
        value = getattr(config, name, None)
    except (ValueError, RuntimeError):  # transformers refuses to say one number where layers differ
        return 0
    return value if isinstance(value, int) else 0
