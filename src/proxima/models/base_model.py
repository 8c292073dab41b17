"""`BaseModel`: what the four roles share: hidden states, logits, saving and loading.

A role is the network with one adapter active (or none). Roles that share a network must not overlap: the
backward pass of one ends before another's adapter is activated, so `BaseModel.active` is a `with` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from proxima.core.errors import first_line
from proxima.core.regular_files import check_files
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
from proxima.runtime.engine import has_kernels, pack


class BaseModel:
    """A role: a backbone, its adapter or None, and its scalar head or None."""

    def __init__(self, backbone: Backbone, adapter: str | None = None, head: nn.Linear | None = None):
        self.backbone = backbone
        self.adapter = adapter
        self.head = head

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

        (The fast path takes the adapter by name; none needs to be active.)
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
        """Hidden states (M, D) that predict each chosen response token, sequence by sequence, without
        padding."""
        sizes = (tokens.prompt_sizes, tokens.sizes, tokens.prompt_ids.shape[1])
        layout = pack(*sizes, self.device, chosen=tokens.holes)
        recorded = tokens.experts if self.replays_experts else None
        experts = None if recorded is None else recorded.whole
        return self.backbone.hidden(tokens.input_ids, layout, self.adapter, experts)

    @property
    def replays_experts(self) -> bool:
        """Whether its tokens go to the experts that were recorded when the policy sampled them."""
        return False

    def response_logits(self, tokens: Tokens) -> Tensor:
        """Logits (B, R, V) that predict each response token, 0 on padding.

        All at once: for inspection, not for training.
        """
        return unpack(self.logits(self.response_hidden(tokens)), tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of this role's hidden states (M, D)."""
        return self.backbone.head(hidden, self.adapter)

    def frozen_head(self, hidden: Tensor) -> Tensor | None:
        """The weight (V, D) by which these states become logits, where that is all that `logits` does, it is
        not trained, and `head_logprobs` takes it; otherwise None."""
        decoder = self.backbone.decoder
        if decoder is None or not decoder.architecture.plain_head or not has_kernels(hidden):
            return None
        head = self.backbone.network.get_output_embeddings()
        plain = type(head) is nn.Linear and head.bias is None and not head.weight.requires_grad
        return head.weight if plain else None

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of this role."""
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
        """Save the role as safetensors: an adapter in PEFT's format or the whole network, and the head.

        Args:
            whole: maps a tensor that is sharded over processes to its full value.
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
        """Load the weights of a role that `save` wrote; shapes must agree."""
        folder = Path(folder)
        try:
            check_files(folder)
            if self.adapter and self.backbone.peft is not None:
                load_adapter_weights(self.backbone.peft, self.adapter, folder / ADAPTER_FILE)
            elif self.backbone.sharded:
                load_sharded(self.backbone.network, folder / NETWORK_FILE)
            else:
                load_model(self.backbone.network, folder / NETWORK_FILE, device=str(self.device))
            if self.head is not None:
                self.head.load_state_dict(load_file(folder / HEAD_FILE, device=str(self.device)))
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            raise ValueError(f"cannot load the weights in {folder}: {first_line(error)}") from error


def scalar_head(size: int, std: float, device: torch.device, count: int = 1) -> nn.Linear:
    """A float32 linear map to one number, or to one for each of `count` heads: weights N(0, std^2), bias
    0."""
    head = nn.Linear(size, count)
    nn.init.normal_(head.weight, std=std) if std else nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head.to(device)
