"""LoRA adapters. In: settings or a folder. Out: adapters on a backbone, made, loaded or copied, in PEFT's own format."""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from transformers.pytorch_utils import Conv1D

from proxima.base_setup.loading import ModelSettings, explain_loading, no_progress_bar
from proxima.models import Backbone
from proxima.models.weight_files import ADAPTER_FILE, adapter_tensors


def lora_config(config: ModelSettings, backbone: Backbone) -> LoraConfig:
    targets: str | list[str] = config.lora_targets
    if targets != "all-linear":
        targets = [name.strip() for name in config.lora_targets.split(",")]
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM" if backbone.network.can_generate() else None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in backbone.network.modules()),
    )


def add_adapter(backbone: Backbone, name: str, settings: LoraConfig) -> str:
    """A fresh adapter: it changes nothing until it is trained."""
    if backbone.peft is None:
        backbone.attach(get_peft_model(backbone.network, settings, adapter_name=name))
    else:
        backbone.peft.add_adapter(name, settings)
        backbone.attach(backbone.peft)
    return name


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder) / "adapter_config.json").is_file()


def load_adapter(backbone: Backbone, name: str, folder: str) -> str:
    """An adapter from a folder; safetensors only."""
    if not is_adapter(folder):
        if not Path(folder).exists():
            raise ValueError(f"there is no adapter {folder!r}, seen from {Path.cwd()}")
        near = Path(folder) / "policy"
        hint = f"; did you mean {str(near)!r}?" if is_adapter(near) else ""
        raise ValueError(f"{folder!r} holds no LoRA adapter (no adapter_config.json){hint}")
    if not (Path(folder) / ADAPTER_FILE).is_file():
        raise ValueError(f"{folder!r} has no {ADAPTER_FILE}; pickled adapters are not loaded")
    with explain_loading("adapter", folder):
        if backbone.peft is None:
            backbone.attach(PeftModel.from_pretrained(backbone.network, folder, adapter_name=name))
        else:
            backbone.peft.load_adapter(folder, adapter_name=name)
            backbone.attach(backbone.peft)
    return name


def merge_adapter(backbone: Backbone, folder: str) -> Backbone:
    """The network with an adapter added to its weights, in float32: half precision would round most of a small update away."""
    backbone.network.float()
    name = load_adapter(backbone, "merged", folder)
    assert backbone.peft is not None
    with backbone.using(name), no_progress_bar():
        return Backbone(backbone.peft.merge_and_unload())


def copy_adapter(backbone: Backbone, source: str, name: str) -> str:
    """A new adapter that starts as a copy of another on the same backbone."""
    assert backbone.peft is not None
    settings = backbone.peft.peft_config[source]
    add_adapter(backbone, name, LoraConfig(**{**settings.to_dict(), "inference_mode": False}))
    state = adapter_tensors(backbone.peft, source)
    set_peft_model_state_dict(backbone.peft, state, adapter_name=name)
    return name
