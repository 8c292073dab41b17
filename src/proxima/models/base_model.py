"""One network in memory and the roles that live on it. In: token ids and masks. Out: hidden states and logits.

A role is the network with exactly one adapter switched on (or none). Roles that share a network must not overlap: a role's
backward ends before another adapter is switched on, which `BaseModel.active` makes a `with` block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from proxima.engine import Decoder, Generation, Layout, pack, supports
from proxima.engine.layout import cells
from proxima.processes.sharding import Lockstep, decoder_layers, fill, shard_network
from proxima.types import Tokens


def unpack(flat: Tensor, tokens: Tokens) -> Tensor:
    """(M, ...) numbers of response tokens at their places in (B, R, ...), 0 on padding."""
    rows, width = tokens.mask.shape
    place = cells(tokens.sizes, width, flat.device)
    return flat.new_zeros(rows * width, *flat.shape[1:]).index_copy(0, place, flat).unflatten(0, (rows, width))


def flatten_column(column: Tensor, tokens: Tokens) -> Tensor:
    """(B, R) numbers as (M,): the opposite of `unpack`."""
    return column.flatten()[cells(tokens.sizes, tokens.mask.shape[1], column.device)]


def by_chunks(function: Callable[..., tuple[Tensor, ...]], tokens: Tokens, *hidden: Tensor) -> tuple[Tensor, ...]:
    """function(hidden states..., ids, kept set) -> numbers (M,) each, over so few rows at once that their logits stay small.

    With gradients, logits are computed again in the backward pass: no more than a chunk of them exists at any time.
    """
    place = cells(tokens.sizes, tokens.mask.shape[1], hidden[0].device)
    ids = tokens.response_ids.flatten()[place]
    kept = None if tokens.kept is None else tokens.kept.map(lambda part: part.flatten(0, 1)[place].unsqueeze(1))
    whole = len(ids) <= CHUNK
    parts = []
    for rows in range(0, len(ids), CHUNK):
        here = slice(rows, rows + CHUNK)
        given = [*(states[here] for states in hidden), ids[here], None if kept is None else kept.map(itemgetter(here))]
        recompute = torch.is_grad_enabled() and not whole
        parts.append(checkpoint(function, *given, use_reentrant=False) if recompute else function(*given))
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


CHUNK = 1024  # response positions whose logits exist at once
HEAD_FILE = "head.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"


@dataclass
class EngineSettings:
    """How a backbone computes; results do not depend on it."""

    fast: bool = True
    compiled: bool = True
    checkpointing: bool = False


class Backbone:
    """A pretrained network with any number of adapters, of which at most one is on at a time. Dropout is off."""

    def __init__(self, network: PreTrainedModel):
        self.network = network.eval().requires_grad_(False)
        self.peft: PeftModel | None = None
        self._active: str | None = None
        self.settings = EngineSettings()
        self._supported: bool | None = None
        self._parameters: dict[str, list[nn.Parameter]] = {}
        self._decoder: Decoder | None = None
        self._generation: Generation | None = None
        self.lockstep: Lockstep | None = None

    @property
    def sharded(self) -> bool:
        """Whether its layers are spread over processes."""
        return self.lockstep is not None

    def shard(self, mesh: DeviceMesh, lockstep: Lockstep) -> None:
        """Spread the layers over processes; adapters stay whole. From then on every pass is one of all processes."""
        adapters = [p for name in (self.peft.peft_config if self.peft else ()) for p in self.adapter_parameters(name)]
        device = self.network.device if mesh.device_type == "cpu" else torch.device(mesh.device_type)
        shard_network(self.network, self.network.base_model, mesh, adapters)
        for tensor in (*self.network.parameters(), *self.network.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)
        self.lockstep = lockstep

    def checkpoint_layers(self) -> None:
        """Compute each layer again in the backward pass instead of keeping its inside; for `transformers`' own forward pass."""
        for layer in decoder_layers(self.network):
            layer.forward = _computed_again(layer.forward)

    def begin_pass(self) -> None:
        if self.lockstep is not None:
            self.lockstep.begin(self, self._active)

    def single_token_pass(self, adapter: str | None, backward: bool) -> None:
        """A pass that changes nothing, for the sake of the other processes."""
        decoder, ids = self.network.base_model, torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with self.using(adapter):
            hidden = decoder(**self.inputs(decoder, ids, ids == 0)).last_hidden_state
            if backward:
                (0 * hidden.sum()).backward()

    @property
    def decoder(self) -> Decoder | None:
        """The fast road, made when first asked for; None where this network is not one it knows, or dropout is on.

        It reads whole weights, so a sharded network does without.
        """
        if not self.settings.fast or self.network.training or self.sharded:
            return None
        if self._supported is None:
            self._supported = supports(self.network)
        if not self._supported:
            return None
        if self._decoder is None:
            self._decoder = Decoder(self.network, self.settings.compiled and self.device.type == "cuda")
            self._decoder.checkpointing = self.settings.checkpointing
        return self._decoder

    @property
    def generation(self) -> Generation | None:
        if self.decoder is None:
            return None
        if self._generation is None:
            self._generation = Generation(self.decoder)
        return self._generation

    def forget_generation(self) -> None:
        """Give back the memory that sampling holds from one call to the next."""
        self._generation = None

    def hidden(self, ids: Tensor, layout: Layout, adapter: str | None) -> Tensor:
        """Last hidden states (M, D) at the layout's places of padded ids (B, T), with one adapter on."""
        if self.decoder is not None:
            return self.decoder.hidden(ids, layout, adapter)
        mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device).flatten()
        mask[layout.source] = True
        with self.using(adapter):
            return self.hidden_states(ids, mask.view(ids.shape)).flatten(0, 1)[layout.source[layout.read]]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, D)."""
        config = self.network.config.get_text_config()
        logits = self.network.get_output_embeddings()(hidden)
        if getattr(config, "logit_scale", None):
            logits = logits * config.logit_scale
        if getattr(config, "logits_scaling", None):
            logits = logits / config.logits_scaling
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        return logits

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def hidden_size(self) -> int:
        return self.network.config.get_text_config().hidden_size

    @property
    def context_length(self) -> int | None:
        """Most tokens the network can read; None where its architecture names no limit."""
        return getattr(self.network.config.get_text_config(), "max_position_embeddings", None)

    def attach(self, peft: PeftModel) -> None:
        """Take over a PeftModel that wraps this network; all its adapters start switched off."""
        self.peft = peft
        self._supported = None
        self._parameters.clear()
        self.network.eval()
        self._switch(None)

    def _switch(self, adapter: str | None) -> None:
        for layer in self.network.modules():
            if isinstance(layer, BaseTunerLayer):
                if adapter is not None:
                    layer.set_adapter(adapter)
                layer.enable_adapters(adapter is not None)
        self._active = adapter

    @contextmanager
    def using(self, adapter: str | None) -> Iterator[None]:
        """Only this adapter is on inside the block; afterwards what was on before."""
        before = self._active
        if adapter != before:
            self._switch(adapter)
        try:
            yield
        finally:
            if adapter != before:
                self._switch(before)

    def adapter_parameters(self, adapter: str) -> list[nn.Parameter]:
        if adapter in self._parameters:
            return self._parameters[adapter]
        found: list[nn.Parameter] = []
        for layer in self.network.modules():
            if isinstance(layer, BaseTunerLayer):
                for name in layer.adapter_layer_names:
                    group = getattr(layer, name)
                    if adapter in group:
                        item = group[adapter]
                        found += [item] if isinstance(item, nn.Parameter) else list(item.parameters())
        self._parameters[adapter] = found
        return found

    def inputs(self, module: nn.Module, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        """Arguments for a whole-sequence pass. Pad ids never reach the network: where the mask is off it reads token 0."""
        given: dict[str, Any] = {
            "input_ids": ids.masked_fill(~mask, 0),
            "attention_mask": mask.long(),
            "use_cache": False,
        }
        if "position_ids" in inspect.signature(module.forward).parameters:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return given

    def hidden_states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states (B, T, D)."""
        decoder = self.network.base_model
        self.begin_pass()
        return decoder(**self.inputs(decoder, ids, mask)).last_hidden_state

    def logits(self, ids: Tensor, mask: Tensor, first: int) -> Tensor:
        """Logits (B, T - first, V) that predict the tokens from column `first` on; none for the prompt."""
        given = self.inputs(self.network, ids, mask)
        self.begin_pass()
        columns = torch.arange(first - 1, ids.shape[1] - 1, device=ids.device)
        if "logits_to_keep" in inspect.signature(self.network.forward).parameters:
            return self.network(**given, logits_to_keep=columns).logits
        return self.network(**given).logits[:, columns]


class BaseModel:
    """A role: a backbone, the adapter it switches on, and perhaps a scalar head."""

    def __init__(self, backbone: Backbone, adapter: str | None = None, head: nn.Linear | None = None):
        self.backbone, self.adapter, self.head = backbone, adapter, head

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @contextmanager
    def active(self) -> Iterator[None]:
        with self.backbone.using(self.adapter):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Gradients reach this role's own weights inside the block. (The fast road needs no adapter switched on.)"""
        if self.backbone.decoder is None:
            with self.active():
                yield
            return
        own = self.parameters()
        for parameter in own:
            parameter.requires_grad_(True)
        yield

    def response_hidden(self, tokens: Tokens) -> Tensor:
        """Hidden states (M, D) that chose each response token, sequence by sequence; no padding among them."""
        layout = pack(tokens.prompt_sizes, tokens.sizes, tokens.prompt_ids.shape[1], self.device)
        return self.backbone.hidden(tokens.input_ids, layout, self.adapter)

    def response_logits(self, tokens: Tokens) -> Tensor:
        """Logits (B, R, V) that chose each response token, 0 on padding. All at once: for looking, not for training."""
        logits = self.backbone.head(self.response_hidden(tokens))
        return unpack(logits, tokens)

    def parameters(self) -> list[nn.Parameter]:
        """What training this role may change."""
        own = self.backbone.adapter_parameters(self.adapter) if self.adapter else list(self.backbone.network.parameters())
        return own + (list(self.head.parameters()) if self.head is not None else [])

    def head_values(self, hidden: Tensor) -> Tensor:
        """The scalar head, in float32: (..., D) -> (...)."""
        assert self.head is not None
        return self.head(hidden.float()).squeeze(-1)

    def save(self, folder: str | Path, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Path:
        """Write the role: an adapter in PEFT's own format or the whole network, and the head; safetensors only.

        Args:
            whole: gives the whole of a tensor, where it is sharded over processes.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.adapter and self.backbone.peft is not None:
            save_adapter(self.backbone.peft, self.adapter, folder)
        else:
            network = self.backbone.network
            state = None
            if self.backbone.sharded:
                state = {name: whole(value).detach() for name, value in network.state_dict(keep_vars=True).items()}
            network.save_pretrained(folder, max_shard_size="1TB", state_dict=state)
        if self.head is not None:
            save_file(
                {name: value.detach().cpu().contiguous() for name, value in self.head.state_dict().items()}, folder / HEAD_FILE
            )
        return folder

    def load(self, folder: str | Path) -> None:
        """Take over the weights of a role that `save` wrote; it must have the same shape."""
        folder = Path(folder)
        try:
            if self.adapter and self.backbone.peft is not None:
                load_adapter_weights(self.backbone.peft, self.adapter, folder / ADAPTER_FILE)
            elif self.backbone.sharded:
                load_sharded(self.backbone.network, folder / "model.safetensors")
            else:
                load_model(self.backbone.network, folder / "model.safetensors", device=str(self.device))
            if self.head is not None:
                self.head.load_state_dict(load_file(folder / HEAD_FILE, device=str(self.device)))
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            raise ValueError(f"cannot load the weights in {folder}: {str(error).splitlines()[0]}") from error


def _computed_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        return checkpoint(forward, *given, use_reentrant=False, **named)

    return call


def load_sharded(network: nn.Module, path: Path) -> None:
    """A network's file into weights of which each process holds a part."""
    state, present = load_file(path), network.state_dict(keep_vars=True)
    filled = {id(present[name]) for name in state if name in present}  # of tied weights only one is in the file
    if odd := sorted({*(state.keys() - present.keys()), *(name for name in present if id(present[name]) not in filled)}):
        raise ValueError(f"it was made for another model ({odd[0]} differs)")
    for name, value in state.items():
        fill(present[name], value)


def load_adapter_weights(peft: PeftModel, adapter: str, path: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    state, present = load_file(path), get_peft_model_state_dict(peft, adapter_name=adapter)
    shapes = [{name: tuple(value.shape) for name, value in weights.items()} for weights in (state, present)]
    if shapes[0] != shapes[1]:
        odd = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))[0][0]
        raise ValueError(f"it was made with other LoRA settings or for another model ({odd} differs)")
    set_peft_model_state_dict(peft, state, adapter_name=adapter)


def save_adapter(peft: PeftModel, adapter: str, folder: Path) -> None:
    """One adapter straight into `folder` (PEFT itself would make a subfolder of the adapter's name)."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(peft, adapter_name=adapter)
    save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, folder / ADAPTER_FILE)
    config = peft.peft_config[adapter]
    before, config.inference_mode = (config.inference_mode, config.target_modules), True
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the same file in every process
    config.save_pretrained(str(folder))
    config.inference_mode, config.target_modules = before


def scalar_head(size: int, deviation: float, device: torch.device) -> nn.Linear:
    """A float32 linear map to one number: weights N(0, deviation), bias 0."""
    head = nn.Linear(size, 1)
    nn.init.normal_(head.weight, std=deviation) if deviation else nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head.to(device)
