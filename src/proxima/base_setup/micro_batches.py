"""`MicroBatches`: splits a rollout into forward passes that fit in memory, and bounds the cache of sampling;
both are halved when memory runs out.

This only bounds memory: sums over a minibatch are the same however it is split. All passes of a step have one
capacity, which follows from its whole batch: a sequence is scored and trained by products of one size.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from proxima.base_setup.memory_rules import (
    STEP,
    TRAINED,
    USUAL_TOKENS,
    MemoryAtHand,
    PassSettings,
    sampling_for_memory,
    tokens_for_memory,
)
from proxima.core.linear4bit import is_quantized
from proxima.core.types import Tokens
from proxima.models import Backbone, short_chunk
from proxima.runtime import device_memory, free_cached_memory, is_out_of_memory
from proxima.runtime.engine import CACHED_PASSES, PassCapacity, SamplingMemory, cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Result = TypeVar("Result")


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
    def of(
        cls, config: PassSettings, minibatch: int, base: Backbone | None = None, trained: int = 0
    ) -> MicroBatches:
        """As configured; tokens that nobody chose are chosen for the base's device.

        Args:
            trained: bytes of the weights of other networks, and of gradients and moments.
        """
        if base is None:
            return cls(config.micro_batch_size, config.micro_batch_tokens or USUAL_TOKENS, minibatch)
        at_hand = MemoryAtHand(device_memory(base.device), base.device.type == "cuda", trained)
        return cls.within(config, minibatch, base.network, at_hand)

    @classmethod
    def within(
        cls, config: PassSettings, minibatch: int, network: PreTrainedModel, at_hand: MemoryAtHand
    ) -> MicroBatches:
        """What a run takes of a device's memory; `proxima doctor` asks for a network without weights."""
        if config.lora_r == 0:
            at_hand = replace(at_hand, itemsize=TRAINED)
        tokens = config.micro_batch_tokens or tokens_for_memory(
            network, at_hand, config.gradient_checkpointing
        )
        short = is_quantized(network) and tokens < USUAL_TOKENS
        return cls(config.micro_batch_size, tokens, minibatch, short, sampling_for_memory(network, at_hand))

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
            self._plan = self.planned(lengths, tokens.sizes.tolist(), self.minibatch)
        elif self._plan is None:
            whole, share = self._sequences, -(-self.minibatch // self._processes)
            self._plan = self.planned(
                (whole.prompt_sizes + whole.sizes).tolist(), whole.sizes.tolist(), share
            )
        return [torch.tensor(group) for group in cut(lengths, self._plan.limit, self.size)]

    def planned(self, lengths: Sequence[int], responses: Sequence[int], minibatch: int) -> PassPlan:
        """Passes of about equal size for minibatches of these sequences."""
        count = min(len(lengths), minibatch)
        spread = max(lengths) - min(lengths)
        longest = max(lengths)
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
        passes = self._divisible(longest) and (self.short or not samples)
        cache = slots > 1 and (self.short or not passes)
        if passes:
            self._halve_passes(longest)
            text = "out of GPU memory: micro-batches are now %d sequences, %d tokens"
            log.warning(text, self.size, self.tokens)
        if cache:
            self._sampling = self._sampling._replace(cache=slots // 2 * each, fewest=1)
            log.warning("out of GPU memory: sampling now has %d slots of %d tokens", slots // 2, each)
        return passes or cache

    def _divisible(self, longest: int) -> bool:
        return self.size > 1 and self.tokens > longest

    def _halve_passes(self, longest: int) -> None:
        self.size = max(1, self.size // 2)
        self.tokens = max(longest, self.tokens // 2)
        self._plan = None

    def least(self, longest: int) -> MicroBatches:
        """What is left of this budget where memory runs out again and again."""
        left = copy.copy(self)
        while left._divisible(longest):
            left._halve_passes(longest)
        left._sampling = left._sampling._replace(cache=longest, fewest=1)
        return left


def _coarse(tokens: int, varies: bool) -> int:
    """Rounded up; where it varies from step to step, to one of sixteen sizes between two powers of two."""
    step = max(STEP, (1 << tokens.bit_length() - 1) // 16) if varies else STEP
    return -(-tokens // step) * step
