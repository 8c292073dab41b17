"""LoRA adapters on a backbone: made, loaded, copied and merged, in PEFT's format."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from proxima.base_setup.adapter_config import plain_adapter
from proxima.base_setup.loading import ModelSettings, explain_loading, no_progress_bar
from proxima.config import trained_quantize
from proxima.core.regular_files import read_file
from proxima.models import ADAPTER_FILE, Backbone, adapter_tensors, fill_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAMBA_TYPES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
MAMBA_MODULES = ("out_proj", "conv1d")
"""Modules of these architectures that PEFT refuses to adapt: their kernels read the weights directly."""


COUNTED = "counted_adapter"


def lora_config(config: ModelSettings, network: PreTrainedModel) -> LoraConfig:
    targets: str | list[str] = config.lora_targets
    if targets != "all-linear":
        targets = [name.strip() for name in config.lora_targets.split(",")]
    made = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        exclude_modules=_unadaptable_linears(network) if targets == "all-linear" else None,
        task_type="CAUSAL_LM" if network.can_generate() else None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in network.modules()),
    )
    if made.lora_dropout and _adapts_experts(made, network):
        made.lora_dropout = 0.0  # PEFT has no dropout on the fused weights of experts
    return made


def _unadaptable_linears(network: PreTrainedModel) -> list[str] | None:
    """Linear layers that "all-linear" leaves out, because an adapter cannot be added to them."""
    linears = [(name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    excluded = [name for name, module in linears if not _is_linear(module)]
    if network.config.model_type in MAMBA_TYPES:
        excluded += MAMBA_MODULES
    return excluded or None


@torch.no_grad()
def _is_linear(module: nn.Linear) -> bool:
    """Whether it computes a linear map; an architecture's own subclass may compute something else."""
    kind = type(module)
    if kind.forward is nn.Linear.forward or not kind.__module__.startswith("transformers.models."):
        return True
    if module.weight.is_meta:
        module = copy.deepcopy(module).to_empty(device="cpu")
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(1)
    x = torch.ones(1, module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    try:
        output = module(x)
    except (RuntimeError, ValueError):  # it needs another shape
        return False
    expected = nn.functional.linear(x, module.weight, module.bias)
    return isinstance(output, Tensor) and torch.allclose(output, expected)


def _adapts_experts(settings: LoraConfig, network: PreTrainedModel) -> bool:
    trial = copy.deepcopy(settings)
    convert_peft_config_for_transformers(trial, network, None)
    return bool(trial.target_parameters)


def unused_name(backbone: Backbone, name: str) -> str:
    """A name for an adapter that no module of the network has: PEFT recognises adapter weights by name
    alone."""
    parts = {part for path, _ in backbone.network.named_modules() for part in path.split(".")}
    while name in parts:
        name += "_adapter"
    return name


def add_adapter(backbone: Backbone, name: str, settings: LoraConfig) -> str:
    """Add a new adapter, which changes nothing until it is trained; returns its name."""
    name = unused_name(backbone, name)
    if backbone.peft is None:
        backbone.attach(get_peft_model(backbone.network, settings, adapter_name=name))
    else:
        backbone.peft.add_adapter(name, settings)
        backbone.attach(backbone.peft)
    return name


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder) / "adapter_config.json").is_file()


def adapter_task(folder: str) -> str | None:
    """PEFT's task type of an adapter, such as CAUSAL_LM or SEQ_CLS; None where its config does not say."""
    try:
        task = json.loads(read_file(Path(folder) / "adapter_config.json"))["task_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return task if isinstance(task, str) else None


def load_adapter(backbone: Backbone, name: str, folder: str) -> str:
    """Load an adapter from a folder, safetensors only; returns its name."""
    if not is_adapter(folder):
        if not Path(folder).exists():
            raise ValueError(f"there is no adapter {folder!r}, seen from {Path.cwd()}")
        near = Path(folder) / "policy"
        hint = f"; did you mean {str(near)!r}?" if is_adapter(near) else ""
        raise ValueError(f"{folder!r} holds no LoRA adapter (no adapter_config.json){hint}")
    if not (Path(folder) / ADAPTER_FILE).is_file():
        raise ValueError(f"{folder!r} has no {ADAPTER_FILE}; pickled adapters are not loaded")
    name = unused_name(backbone, name)
    with explain_loading("adapter", folder), plain_adapter(folder) as plain:
        if backbone.peft is None:
            backbone.attach(PeftModel.from_pretrained(backbone.network, plain, adapter_name=name))
        else:
            backbone.peft.load_adapter(plain, adapter_name=name)
            backbone.attach(backbone.peft)
        assert backbone.peft is not None
        state = load_file(Path(folder) / ADAPTER_FILE)
        # a file in an older format has other keys; PEFT has converted it then
        if state.keys() == adapter_tensors(backbone.peft, name).keys():
            fill_adapter(backbone.peft, name, state)
    return name


def warn_of_another_base(backbone: Backbone, folder: str) -> None:
    """Where an adapter is recorded to be trained beside other weights: the base in 4 bits, or in full."""
    forms = {"nf4": "the base in 4 bits (quantize nf4)", "none": "the base in full (quantize none)"}
    trained, own = trained_quantize(Path(folder)), "nf4" if backbone.quantized else "none"
    if trained is not None and trained != own:
        warnings.warn(
            f"the adapter {folder!r} was trained on {forms[trained]} and is used on {forms[own]}, where its "
            f"outputs differ; set quantize to {trained}, or train it with --quantize {own}",
            stacklevel=3,
        )


def merge_adapter(backbone: Backbone, folder: str) -> Backbone:
    """The network with an adapter merged into its weights, in float32: half precision would round most of a
    small update away."""
    backbone.network.float()
    name = load_adapter(backbone, "merged", folder)
    assert backbone.peft is not None
    with backbone.using(name), no_progress_bar():
        return Backbone(backbone.peft.merge_and_unload())


def copy_adapter(backbone: Backbone, source: str, name: str) -> str:
    """A new adapter that starts as a copy of another on the same backbone."""
    assert backbone.peft is not None
    settings = backbone.peft.peft_config[source]
    name = add_adapter(backbone, name, LoraConfig(**{**settings.to_dict(), "inference_mode": False}))
    fill_adapter(backbone.peft, name, adapter_tensors(backbone.peft, source))
    return name


def adapter_size(network: PreTrainedModel, settings: LoraConfig) -> int:
    """Weights of an adapter on a network, which may have no weights behind it and stays as it is."""
    with torch.device("meta"):
        adapted = get_peft_model(copy.deepcopy(network).to("meta"), settings, adapter_name=COUNTED)
    return sum(weight.numel() for name, weight in adapted.named_parameters() if COUNTED in name.split("."))
