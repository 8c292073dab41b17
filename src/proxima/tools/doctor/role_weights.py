"""How many weights a run trains and loads, counted on networks without memory behind them.

In: a config and the base. The adapters are those of the config, or of the folders that it names, on the
layers that PEFT puts them on; roles are those that `base_setup.build_models` makes. Out: `RoleWeights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from peft import PeftConfig
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from proxima.base_setup import adapter_size, has_head, is_adapter, load_config, lora_config
from proxima.config import PPOConfig
from proxima.core.errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class RoleWeights:
    """Numbers of weights."""

    trained: int
    """Of the policy and the value model, heads included: they have gradients and moments."""
    copies: int = 0
    """Of whole networks that train, in float32 beside the frozen base."""
    adapters: int = 0
    """Of all adapters on the base, whether they train or not."""
    networks: int = 0
    """Of a value model's own network that does not train."""
    elsewhere: int = 0
    """Of an adapter on it."""
    reference: int = 0
    """Of the reference's adapter, which is among `adapters`."""


def role_weights(config: PPOConfig, base: PreTrainedModel) -> RoleWeights:
    """
    Args:
        base: may be without weights.
    """
    full = config.lora_r == 0
    scorer = trained_reward(config)
    own = 0 if full else adapter_size(base, lora_config(config, base))
    sft = _saved(base, config.sft_adapter, own) if config.sft_adapter else 0
    reward = _saved(base, scorer, own) if scorer and is_adapter(scorer) else 0
    policy = count_weights(base) if full else sft or own
    value, network = 0, None
    if config.has_critic and config.value_model != "policy":
        network = value_network(config, scorer)
        if network is not None:
            value = count_weights(network) if full else adapter_size(network, lora_config(config, network))
        elif full:
            value = count_weights(base)
        elif config.value_model == "adapter":
            value = reward or sft or own
        else:
            value = _saved(base, config.value_model, own) if is_adapter(config.value_model) else own
    head = base.get_input_embeddings().weight.shape[1] + 1 if config.has_critic else 0
    trained, loaded = policy + value + head, sft + reward
    if full:
        return RoleWeights(trained, copies=policy + value, adapters=loaded)
    if network is not None:
        return RoleWeights(
            trained,
            adapters=loaded + policy,
            networks=count_weights(network),
            elsewhere=value,
            reference=sft,
        )
    return RoleWeights(trained, adapters=loaded + policy + value, reference=sft)


def trained_reward(config: PPOConfig) -> str:
    """Folder of the reward model trained by this package; empty = none."""
    sources = [spec.source for spec in config.rewards if isinstance(spec.source, str)]
    return next((source for source in sources if has_head(source)), "")


def value_network(config: PPOConfig, scorer: str) -> PreTrainedModel | None:
    """A value model's own network: the checkpoint that the config names, or a copy of a reward model that is
    a whole network. None where it is on the base, or its config cannot be read (loading then says why).

    Args:
        scorer: folder of the reward model trained by this package; empty = none.
    """
    name, kind = config.value_model, AutoModel
    if name == "adapter":
        name, kind = scorer, AutoModelForCausalLM
    if not name or is_adapter(name):
        return None
    try:
        return without_weights(kind, load_config(name, config.trust_remote_code))
    except ValueError:
        return None


def _saved(base: PreTrainedModel, folder: str, otherwise: int) -> int:
    """Weights of a saved adapter; where its config cannot be read (loading then says why), as many as a new
    one has."""
    try:
        return adapter_size(base, PeftConfig.from_pretrained(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return otherwise


def without_weights(
    kind: type[AutoModel | AutoModelForCausalLM],
    network: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """The modules of a network with the shapes of their weights but no memory behind them."""
    try:
        with torch.device("meta"):
            return kind.from_config(network, dtype=dtype)
    except (ValueError, KeyError) as error:
        raise ValueError(f"the size of a {network.model_type} is not known: {first_line(error)}") from None


def count_weights(built: nn.Module) -> int:
    return sum(weight.numel() for weight in built.parameters())
