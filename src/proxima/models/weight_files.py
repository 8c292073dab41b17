"""Weights in a folder.

In: an adapter or a network. Out: safetensors, as PEFT and `transformers` write them; and back.
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from proxima.runtime.distributed.sharding import copy_full_tensor

HEAD_FILE = "head.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
NETWORK_FILE = "model.safetensors"


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)


def adapter_tensors(peft: PeftModel, adapter: str) -> dict[str, Tensor]:
    """An adapter's weights as PEFT names them.

    Told where the base came from, PEFT would ask the Hub at every save whether the vocabulary has grown; ours
    never does.
    """
    config = peft.peft_config[adapter]
    name, config.base_model_name_or_path = config.base_model_name_or_path, None
    try:
        return get_peft_model_state_dict(peft, adapter_name=adapter)
    finally:
        config.base_model_name_or_path = name


def save_adapter(peft: PeftModel, adapter: str, folder: Path) -> None:
    """One adapter straight into `folder` (PEFT itself would make a subfolder of the adapter's name)."""
    save_tensors(adapter_tensors(peft, adapter), folder / ADAPTER_FILE)
    config = peft.peft_config[adapter]
    before, config.inference_mode = (config.inference_mode, config.target_modules), True
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the same file in every process
    config.save_pretrained(str(folder))
    config.inference_mode, config.target_modules = before


def load_adapter_weights(peft: PeftModel, adapter: str, path: Path) -> None:
    """Into an adapter that is there already, of the same shape."""
    fill_adapter(peft, adapter, load_file(path))


@torch.no_grad()
def fill_adapter(peft: PeftModel, adapter: str, state: dict[str, Tensor]) -> None:
    """Exactly these weights, by the names under which they are saved (PEFT's loader takes some of them for
    older ones, renames them, and leaves the adapter as it was)."""
    present = adapter_tensors(peft, adapter)
    shapes = [{name: tuple(value.shape) for name, value in weights.items()} for weights in (state, present)]
    if shapes[0] != shapes[1]:
        odd = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))[0][0]
        raise ValueError(f"it was made with other LoRA settings or for another model ({odd} differs)")
    for name, tensor in present.items():
        tensor.copy_(state[name])


def load_sharded(network: nn.Module, path: Path) -> None:
    """A network's file into weights of which each process holds a part."""
    state, present = load_file(path), network.state_dict(keep_vars=True)
    filled = {
        id(present[name]) for name in state if name in present
    }  # of tied weights only one is in the file
    if odd := sorted(
        {*(state.keys() - present.keys()), *(name for name in present if id(present[name]) not in filled)}
    ):
        raise ValueError(f"it was made for another model ({odd[0]} differs)")
    for name, value in state.items():
        copy_full_tensor(present[name], value)
