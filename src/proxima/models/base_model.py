"""`BaseModel`: what the four roles share. In: token ids and masks. Out: hidden states, logits, a role in a
folder.

A role is the network with exactly one adapter switched on (or none). Roles that share a network must not
overlap: a role's backward ends before another adapter is switched on, which `BaseModel.active` makes a `with`
block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from proxima.core.types import Tokens
from proxima.models.backbone import Backbone
from proxima.models.response_tokens import unpack
from proxima.models.weight_files import (
    ADAPTER_FILE,
    HEAD_FILE,
    NETWORK_FILE,
    load_adapter_weights,
    load_sharded,
    save_adapter,
    save_tensors,
)
from proxima.runtime.engine import pack


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
        """Gradients reach this role's own weights inside the block.

        (The fast path needs no adapter switched on.)
        """
        if self.backbone.decoder is None:
            with self.active():
                yield
            return
        own = self.parameters()
        for parameter in own:
            parameter.requires_grad_(True)
        yield

    def response_hidden(self, tokens: Tokens) -> Tensor:
        """Hidden states (M, D) that chose each response token, sequence by sequence; no padding among
        them."""
        layout = pack(tokens.prompt_sizes, tokens.sizes, tokens.prompt_ids.shape[1], self.device)
        return self.backbone.hidden(tokens.input_ids, layout, self.adapter)

    def response_logits(self, tokens: Tokens) -> Tensor:
        """Logits (B, R, V) that chose each response token, 0 on padding.

        All at once: for looking, not for training.
        """
        return unpack(self.logits(self.response_hidden(tokens)), tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of this role's hidden states (M, D)."""
        return self.backbone.head(hidden, self.adapter)

    def parameters(self) -> list[nn.Parameter]:
        """What training this role may change."""
        own = (
            self.backbone.adapter_parameters(self.adapter)
            if self.adapter
            else list(self.backbone.network.parameters())
        )
        return own + (list(self.head.parameters()) if self.head is not None else [])

    def head_values(self, hidden: Tensor) -> Tensor:
        """The scalar head, in float32: (..., D) -> (...)."""
        assert self.head is not None
        return self.head(hidden.float()).squeeze(-1)

    def save(self, folder: str | Path, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Path:
        """Write the role: an adapter in PEFT's own format or the whole network, and the head; safetensors
        only.

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
                state = {
                    name: whole(value).detach() for name, value in network.state_dict(keep_vars=True).items()
                }
            network.save_pretrained(folder, max_shard_size="1TB", state_dict=state)
        if self.head is not None:
            save_tensors(self.head.state_dict(), folder / HEAD_FILE)
        return folder

    def load(self, folder: str | Path) -> None:
        """Take over the weights of a role that `save` wrote; it must have the same shape."""
        folder = Path(folder)
        try:
            if self.adapter and self.backbone.peft is not None:
                load_adapter_weights(self.backbone.peft, self.adapter, folder / ADAPTER_FILE)
            elif self.backbone.sharded:
                load_sharded(self.backbone.network, folder / NETWORK_FILE)
            else:
                load_model(self.backbone.network, folder / NETWORK_FILE, device=str(self.device))
            if self.head is not None:
                self.head.load_state_dict(load_file(folder / HEAD_FILE, device=str(self.device)))
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            raise ValueError(f"cannot load the weights in {folder}: {str(error).splitlines()[0]}") from error


def scalar_head(size: int, deviation: float, device: torch.device) -> nn.Linear:
    """A float32 linear map to one number: weights N(0, deviation), bias 0."""
    head = nn.Linear(size, 1)
    nn.init.normal_(head.weight, std=deviation) if deviation else nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head.to(device)
