"""The memory a run needs, estimated before it starts.

In: a config, the model's config and the longest prompt. The network is built without weights, in the form
that the run loads, and `MicroBatches` and `SamplingMemory` plan passes and sampling for it, as in the run.
Out: bytes by what takes them:

weights      of the base as it is loaded (and of networks of their own); where all weights train, 4 bytes per
             weight of each trained copy; with quantize nf4 two of the largest matrices in full
adapters     4 bytes per weight of every adapter that is loaded
optimizer    12 bytes per trained weight: gradient and two moments
activations  KEPT x tokens of a pass x (inputs + outputs of every linear map) x bytes per number; with
             gradient_checkpointing two hidden states per layer and the activations of one layer
cache        2 x layers x key-value heads x head size x bytes per number x tokens of all sequences
             generated at once
logits       LOGITS x positions of a chunk x vocabulary x 4 bytes
overhead     libraries, and on a GPU the context and captured graphs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from proxima.base_setup import (
    LOGITS,
    MOMENTS,
    TRAINED,
    MemoryAtHand,
    MicroBatches,
    cached_bytes,
    config_number,
    held_bytes,
    quantization_of,
    quantize_without_weights,
)
from proxima.config import PPOConfig
from proxima.environments import max_chosen_tokens, max_response_tokens
from proxima.models import CHUNK
from proxima.runtime import device_memory
from proxima.runtime.distributed import decoder_layers
from proxima.runtime.engine import expert_matrices, knows
from proxima.tools.doctor.role_weights import count_weights, role_weights, without_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# numbers kept for the backward pass, as a multiple of the inputs and outputs of all maps (measured: 1.17)
KEPT = 1.2
BACKWARD = 4  # the same for the one layer whose backward pass is running
KEPT_BY_KERNELS = 0.9  # both again, for adapters on a GPU
BACKWARD_BY_KERNELS = 2
OVERHEAD = {"cuda": 2**31, "cpu": 3 * 2**28}
GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of a step."""

    weights: int
    adapters: int
    optimizer: int
    activations: int
    cache: int
    logits: int
    overhead: int

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def largest(self) -> str:
        return max(fields(self), key=lambda part: getattr(self, part.name)).name


@dataclass(frozen=True)
class NetworkSize:
    """What the formula needs to know about a network."""

    in_layers: int
    """Bytes of the decoder layers, which several processes may shard."""
    largest: int
    """Weights of the largest linear map except the last."""
    widths: int
    """Inputs plus outputs, summed over all linear maps except the last."""
    layers: int
    hidden: int
    vocabulary: int


def base_without_weights(config: PPOConfig, network: PreTrainedConfig, on_gpu: bool) -> PreTrainedModel:
    """The base as a run has it: in its dtype, with its linear layers in 4 bits where the config says so."""
    usual = "bfloat16" if on_gpu else "float32"
    dtype = getattr(torch, usual if config.dtype == "auto" else config.dtype)
    built = without_weights(AutoModelForCausalLM, network, dtype)
    if config.quantize == "nf4":
        quantize_without_weights(built, quantization_of(network))
    return built


def network_size(built: PreTrainedModel) -> NetworkSize:
    """Of a network, which may have no weights behind it."""
    last = built.get_output_embeddings()
    maps = [
        (part.in_features, part.out_features) if isinstance(part, nn.Linear) else tuple(part.weight.shape)
        for part in built.modules()
        if isinstance(part, nn.Linear | Conv1D) and part is not last
    ]
    text, layers = built.config.get_text_config(), decoder_layers(built)
    used = config_number(text, "num_experts_per_tok") or 1
    of_experts = [used * sum(weight.shape[1:]) for weight in expert_matrices(built).values()]
    return NetworkSize(
        in_layers=sum(map(held_bytes, layers)),
        largest=max(inputs * outputs for inputs, outputs in maps),
        widths=sum(map(sum, maps)) + sum(of_experts),
        layers=len(layers),
        hidden=config_number(text, "hidden_size") or built.get_input_embeddings().weight.shape[1],
        vocabulary=text.vocab_size,
    )


def estimate_memory(
    config: PPOConfig,
    network: PreTrainedConfig,
    longest_prompt: int = 512,
    on_gpu: bool = True,
    others: Sequence[PreTrainedConfig] = (),
    value: PreTrainedConfig | None = None,
    smallest: bool = False,
    processes: int = 1,
    memory: int | None = None,
) -> MemoryEstimate:
    """Bytes at the peak of a step.

    Args:
        network: the model's config, as `transformers` has it.
        longest_prompt: in tokens.
        others: configs of further networks that are loaded and do not train, such as reward models.
        smallest: what is left when memory runs out again and again.
        processes: how many share the batch (and, with shard_base, the layers); the estimate is for one.
        memory: bytes of the device, from which follows how much a pass takes and how many sequences are
            generated at once; None = the usual pass, and all sequences.
    """
    base = base_without_weights(config, network, on_gpu)
    size = network_size(base)
    roles = role_weights(config, base)
    width = base.dtype.itemsize
    sharded = config.shard_base and processes > 1
    held = held_bytes(base) - (size.in_layers * (processes - 1) // processes if sharded else 0)
    loaded = roles.networks + sum(count_weights(without_weights(AutoModel, other)) for other in others)
    beside = width * loaded + 4 * (roles.copies + roles.elsewhere)
    at_hand = MemoryAtHand(memory, on_gpu, beside + MOMENTS * roles.trained, 4 * roles.adapters)
    longest = longest_prompt + max_response_tokens(config)
    budget = MicroBatches.within(config, config.minibatch_size, base, at_hand)
    sequences = -(-config.batch_size * config.num_generations // processes)
    passes = _passes(config, budget.least(longest) if smallest else budget, longest, sequences, processes)
    fast = config.engine != "plain" and not sharded and knows(base)
    slots, each = (
        passes.budget.sampling.cache_size(sequences, longest, on_gpu) if fast else (sequences, longest)
    )
    scratch = 2 * size.largest * width if config.quantize == "nf4" else 0
    tokens = passes.padded if fast and on_gpu else passes.tokens
    return MemoryEstimate(
        weights=held + beside - 4 * roles.elsewhere + scratch,
        adapters=4 * (roles.adapters + roles.elsewhere),
        optimizer=MOMENTS * roles.trained,
        activations=int(tokens * _kept_bytes(config, size, on_gpu, width)),
        cache=slots * each * cached_bytes(base, 0 if config.lora_r else TRAINED),
        logits=LOGITS * passes.positions * size.vocabulary * 4,
        overhead=OVERHEAD["cuda" if on_gpu else "cpu"],
    )


class _Passes(NamedTuple):
    """The largest pass with gradients."""

    budget: MicroBatches
    tokens: int
    padded: int
    """As a captured pass has them."""
    positions: int
    """Whose logits are in memory at once."""


def _passes(config: PPOConfig, budget: MicroBatches, longest: int, sequences: int, processes: int) -> _Passes:
    """As a run plans them where all sequences are as long as the longest."""
    responses, minibatch = max_response_tokens(config), -(-config.minibatch_size // processes)
    plan = budget.planned([longest] * sequences, [responses] * sequences, minibatch)
    rows = min(sequences, minibatch, budget.size, max(1, plan.limit // longest))
    positions = budget.chunk or min(CHUNK, rows * max_chosen_tokens(config))
    return _Passes(budget, rows * longest, plan.capacity.tokens, positions)


def _kept_bytes(config: PPOConfig, size: NetworkSize, on_gpu: bool, width: int) -> float:
    """Per token of a pass: what the backward pass needs, and what the layer it is at takes."""
    layer, full = size.widths / size.layers, config.lora_r == 0
    by_kernels = on_gpu and not full
    share, backward = (KEPT_BY_KERNELS, BACKWARD_BY_KERNELS) if by_kernels else (KEPT, BACKWARD)
    numbers = share * size.widths + backward * layer
    if config.gradient_checkpointing:
        numbers = share * layer + 2 * size.layers * size.hidden + backward * layer
    return numbers * (TRAINED if full else width)


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take on a device; of main memory also what a container allows."""
    if device.type == "cuda":
        return torch.accelerator.get_memory_info(device)[0]
    amounts = [amount for amount in (device_memory(device),) if amount is not None]
    if (table := Path("/proc/meminfo")).is_file():
        amounts += [
            int(line.split()[1]) * 1024
            for line in table.read_text().splitlines()
            if line.startswith("MemAvailable")
        ]
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdecimal():
        amounts.append(int(text) - int(used.read_text()))
    return max(0, min(amounts))
