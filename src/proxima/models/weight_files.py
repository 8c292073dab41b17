"""Saves and loads adapters and networks as safetensors, in the formats of PEFT and `transformers`."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from proxima.runtime.distributed import copy_full_tensor

HEAD_FILE = "head.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
NETWORK_FILE = "model.safetensors"


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)


def adapter_tensors(peft: PeftModel, adapter: str) -> dict[str, Tensor]:
    """An adapter's weights under PEFT's names.

    The base's name is hidden meanwhile: PEFT would ask the Hub at every save whether the vocabulary has
    grown, which never happens here.
    """
    config = peft.peft_config[adapter]
    name = config.base_model_name_or_path
    config.base_model_name_or_path = None
    try:
        return get_peft_model_state_dict(peft, adapter_name=adapter)
    finally:
        config.base_model_name_or_path = name


def save_adapter(peft: PeftModel, adapter: str, folder: Path) -> None:
    """Save one adapter directly in `folder` (PEFT would make a subfolder named after the adapter)."""
    save_tensors(adapter_tensors(peft, adapter), folder / ADAPTER_FILE)
    config = peft.peft_config[adapter]
    before = config.inference_mode, config.target_modules
    config.inference_mode = True
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the same file on every process
    config.save_pretrained(str(folder))
    config.inference_mode, config.target_modules = before


def load_adapter_weights(peft: PeftModel, adapter: str, path: Path) -> None:
    """Load weights into an existing adapter of the same shape."""
    fill_adapter(peft, adapter, load_file(path))


@torch.no_grad()
def fill_adapter(peft: PeftModel, adapter: str, state: dict[str, Tensor]) -> None:
    """Set exactly these weights, by their saved names. (PEFT's loader mistakes some names for older ones,
    renames them and leaves the adapter unchanged.)"""
    present = adapter_tensors(peft, adapter)
    given_shapes = {name: tuple(value.shape) for name, value in state.items()}
    shapes = {name: tuple(value.shape) for name, value in present.items()}
    if given_shapes != shapes:
        odd = sorted(set(given_shapes.items()) ^ set(shapes.items()))[0][0]
        raise ValueError(f"it was made with other LoRA settings or for another model ({odd} differs)")
    for name, tensor in present.items():
        tensor.copy_(state[name])


def load_sharded(network: nn.Module, path: Path) -> None:
    """Load a network's file into weights that are sharded over processes."""
    state = load_file(path)
    present = network.state_dict(keep_vars=True)
    filled = {id(present[name]) for name in state if name in present}  # the file has one of tied weights
    unknown = state.keys() - present.keys()
    missing = {name for name in present if id(present[name]) not in filled}
    if odd := sorted(unknown | missing):
        raise ValueError(f"it was made for another model ({odd[0]} differs)")
    for name, value in state.items():
        copy_full_tensor(present[name], value)
