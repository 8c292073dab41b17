"""The memory a run needs, estimated before it starts.

In: a config, the model's config and the longest prompt. Out: bytes by what takes them:

weights      parameters x bytes per weight (and those of reward and value models with networks of their own);
             where all weights train, 4 bytes per parameter for each trained network beside them; with
             quantize nf4 0.516 bytes per weight of a linear map, and two of the largest in full
adapters     rank x (inputs + outputs of every adapted linear map) x 4 bytes, for each role that has one
optimizer    12 bytes per trained weight: gradient and two moments
activations  KEPT x tokens of a pass x (inputs + outputs of every linear map) x bytes per number; with
             gradient_checkpointing two hidden states per layer and the activations of one layer
cache        2 x layers x key-value heads x head size x bytes per number x tokens of all sequences
             generated at once, which follow from the device's memory, as in a run; both this and a chunk of
             logits follow from micro_batch_tokens where quantize and a number below the usual one say that
             memory is short
logits       LOGITS x positions of a chunk x vocabulary x 4 bytes
overhead     libraries, and on a GPU the context and captured graphs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from proxima.base_setup import LOGITS, MOMENTS, USUAL_TOKENS, config_number, has_head, is_adapter
from proxima.config import PPOConfig
from proxima.core.errors import first_line
from proxima.core.nf4 import NF4_BYTES
from proxima.environments import max_chosen_tokens, max_response_tokens
from proxima.models import CHUNK, short_chunk
from proxima.runtime import device_memory
from proxima.runtime.distributed import decoder_layers
from proxima.runtime.engine import (
    CACHED_PASSES,
    SamplingMemory,
    cache_tokens,
    expert_matrices,
    fewest_slots,
)

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


FUSED_FROM = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices of an expert; each adds its rank to an adapter."""


@dataclass(frozen=True)
class NetworkSize:
    """What the formula needs to know about a network."""

    parameters: int
    in_layers: int
    """Those of the decoder layers, which several processes may shard."""
    mapped: int
    """Weights of all linear maps except the last."""
    largest: int
    """Weights of the largest of them."""
    widths: int
    """Inputs plus outputs, summed over all linear maps except the last."""
    adapted: int
    """The same for those that get an adapter."""
    layers: int
    hidden: int
    cached: int
    """Cached numbers per token: keys and values of all layers."""
    vocabulary: int


def without_weights(kind: type[AutoModel], network: PreTrainedConfig) -> PreTrainedModel:
    """The modules of a network with the shapes of their weights but no memory behind them."""
    try:
        with torch.device("meta"):
            return kind.from_config(network)
    except (ValueError, KeyError) as error:
        raise ValueError(f"the size of a {network.model_type} is not known: {first_line(error)}") from None


def count_weights(built: nn.Module) -> int:
    return sum(weight.numel() for weight in built.parameters())


def network_size(network: PreTrainedConfig, targets: str = "all-linear") -> NetworkSize:
    """From the model's config alone."""
    built = without_weights(AutoModelForCausalLM, network)
    last = built.get_output_embeddings()
    maps = {
        name: part
        for name, part in built.named_modules()
        if isinstance(part, (nn.Linear, Conv1D)) and part is not last
    }
    names = [name.strip() for name in targets.split(",")]
    widths = {name: sum(part.weight.shape) for name, part in maps.items()}
    adapted = [
        width for name, width in widths.items() if targets == "all-linear" or name.split(".")[-1] in names
    ]
    text, layers = network.get_text_config(), decoder_layers(built)
    used = config_number(text, "num_experts_per_tok") or 1
    for name, weight in expert_matrices(built).items():
        one, fused = sum(weight.shape[1:]), FUSED_FROM.get(name.split(".")[-1], ())
        widths[name] = used * one
        if targets == "all-linear" or set(names) & set(fused):
            adapted.append(len(weight) * len(fused) * one)
    hidden = config_number(text, "hidden_size") or built.get_input_embeddings().weight.shape[1]
    heads = config_number(text, "num_attention_heads")
    keys = (config_number(text, "num_key_value_heads") or heads) * (
        config_number(text, "head_dim") or hidden // max(1, heads)
    )
    return NetworkSize(
        parameters=count_weights(built),
        in_layers=sum(count_weights(layer) for layer in layers),
        mapped=sum(part.weight.numel() for part in maps.values()),
        largest=max(part.weight.numel() for part in maps.values()),
        widths=sum(widths.values()),
        adapted=sum(adapted),
        layers=len(layers),
        hidden=hidden,
        cached=2 * len(layers) * keys,
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
        others: configs of reward models with networks of their own.
        value: that of such a value model.
        smallest: with passes of one sequence, as a run on a GPU falls back to when memory runs out.
        processes: how many share the batch (and, with shard_base, the layers); the estimate is for one.
        memory: bytes of the device, which bound how many sequences are generated at once; None = no bound.
    """
    size = network_size(network, config.lora_targets)
    width = 4 if config.dtype == "float32" or (config.dtype == "auto" and not on_gpu) else 2
    full = config.lora_r == 0
    base = size.parameters - (size.in_layers * (processes - 1) // processes if config.shard_base else 0)
    has_value = config.has_critic and config.value_model != "policy"
    own = _count_all([value]) if has_value and value is not None else 0
    adapted = config.lora_r * size.adapted
    trained = base + has_value * (own or base) if full else adapted * (1 + has_value)
    batch = -(-config.batch_size * config.num_generations // processes)
    held = (base + _count_all(others) + (0 if full else own)) * width + _quantized(config, size, width)
    longest = longest_prompt + max_response_tokens(config)
    sequences = 1 if smallest else min(batch, -(-config.minibatch_size // processes), config.micro_batch_size)
    budget = config.micro_batch_tokens or USUAL_TOKENS
    tokens = max(longest, min(sequences * longest, budget))
    positions = min(_chunk(config, budget), max(1, tokens // longest) * max_chosen_tokens(config))
    weights = held + (4 * trained if full else 0)
    adapters = 4 * ((0 if full else trained) + _frozen_adapters(config) * adapted)
    fitting = cache_tokens(memory, weights + adapters + MOMENTS * trained, size.cached * width)
    slots = _sampling(config, budget, fitting, on_gpu).slots(longest)
    return MemoryEstimate(
        weights=weights,
        adapters=adapters,
        optimizer=MOMENTS * trained,
        activations=int(tokens * _kept(config, size, on_gpu and not full) * (4 if full else width)),
        cache=min(batch, slots) * longest * size.cached * width,
        logits=LOGITS * positions * size.vocabulary * 4,
        overhead=OVERHEAD["cuda" if on_gpu else "cpu"],
    )


def _quantized(config: PPOConfig, size: NetworkSize, width: int) -> int:
    """What the base's bytes change by in 4 bits."""
    if config.quantize == "none":
        return 0
    return int(size.mapped * (NF4_BYTES - width)) + 2 * size.largest * width


def _count_all(networks: Sequence[PreTrainedConfig]) -> int:
    return sum(count_weights(without_weights(AutoModel, network)) for network in networks)


def _kept(config: PPOConfig, size: NetworkSize, by_kernels: bool) -> float:
    """Numbers per token of a pass that the backward pass needs, and those of the layer it is at."""
    layer = size.widths / size.layers
    share, backward = (KEPT_BY_KERNELS, BACKWARD_BY_KERNELS) if by_kernels else (KEPT, BACKWARD)
    if config.gradient_checkpointing:
        return share * layer + 2 * size.layers * size.hidden + backward * layer
    return share * size.widths + backward * layer


def _is_short(config: PPOConfig, tokens: int) -> bool:
    return config.quantize != "none" and tokens < USUAL_TOKENS


def _chunk(config: PPOConfig, tokens: int) -> int:
    """Positions whose logits are in memory at once."""
    return short_chunk(tokens) if _is_short(config, tokens) else CHUNK


def _sampling(config: PPOConfig, tokens: int, fitting: float, on_gpu: bool) -> SamplingMemory:
    """As in a run, where so many cached tokens fit in the device's memory."""
    cached = min(fitting, CACHED_PASSES * tokens) if _is_short(config, tokens) else fitting
    return SamplingMemory(cached, fewest_slots(on_gpu))


def _frozen_adapters(config: PPOConfig) -> int:
    """How many adapters are loaded that do not train: of SFT, and of reward models on this base."""
    rewards = [spec.source for spec in config.rewards if isinstance(spec.source, str)]
    return bool(config.sft_adapter) + sum(is_adapter(source) for source in rewards if has_head(source))


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
