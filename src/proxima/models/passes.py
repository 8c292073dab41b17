"""`Passes`: a network's own `transformers` forward pass. In: ids and masks. Out: hidden states and logits.

Networks of many architectures are called in one way here. What differs between them (where the layers end and
the head begins, whether positions may be given, what left padding does) is measured once by `probe`, never
looked up in a list of names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

CACHES = ("past_key_values", "cache_params", "state")
"""The names under which networks return their cache and take it back."""

Decoding = Literal["padded", "grouped", "whole"]
"""How a batch is sampled: prompts padded on the left; prompts of equal length together; or without a cache,
which is slow."""

Arguments: TypeAlias = dict[str, object]
"""Keyword arguments of a forward pass: tensors, flags and caches."""


@dataclass(frozen=True)
class Passes:
    """How a network is called."""

    network: PreTrainedModel
    trunk: nn.Module  # embeddings and layers: the head reads its output
    owner: nn.Module | None  # the module that calls the trunk; None where the network has no head
    name: str  # of the trunk in its owner
    width: int  # of a hidden state
    vocabulary: int  # logits per position
    first_position: int | None = 0  # of a sequence; None = the network counts positions itself
    decoding: Decoding = "padded"

    @staticmethod
    def known(network: PreTrainedModel) -> Passes:
        """For an architecture that the fast path knows, which needs no probing."""
        trunk = network.base_model
        config = network.config.get_text_config()
        if trunk is network:
            return Passes(network, network, None, "", config.hidden_size, 0)
        owner, name = owner_of(network, trunk)
        return Passes(
            network, trunk, owner, name, config.hidden_size, len(network.get_output_embeddings().weight)
        )

    # --- whole sequences ---

    def inputs(self, module: nn.Module, ids: Tensor, mask: Tensor) -> Arguments:
        """Arguments for a whole-sequence pass.

        Pad ids never reach the network: where the mask is False it reads token 0.
        """
        given: Arguments = {
            "input_ids": ids.masked_fill(~mask, 0),
            "attention_mask": mask.long(),
            "use_cache": False,
        }
        if self.first_position is not None:
            given["position_ids"] = self._positions(mask)
        return accepted_arguments(module, given)

    def _positions(self, mask: Tensor) -> Tensor:
        return (mask.cumsum(1) - 1).clamp(min=0) + (self.first_position or 0)

    def hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states (B, T, D)."""
        return self.trunk(**self.inputs(self.trunk, ids, mask))[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, D), by what the network itself does after its layers."""
        assert self.owner is not None
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        modules: dict[str, Any] = self.owner._modules
        modules[self.name] = _FixedTrunk(self.trunk, hidden.unsqueeze(0))
        given = accepted_arguments(self.network, {"input_ids": ids, "use_cache": False})
        try:
            return logits_or_hidden(self.network(**given))[0]
        finally:
            modules[self.name] = self.trunk

    # --- one token at a time ---

    def steps(
        self, ids: Tensor, mask: Tensor, begin: Callable[[], None] = lambda: None
    ) -> Generator[Tensor, Tensor, None]:
        """Yields logits (B, V) of the next token; send it the sampled tokens (B,).

        Args:
            ids, mask: (B, T) prompts, padded on the left unless `decoding` is "grouped".
            begin: called before each forward pass.
        """
        step = self._whole_steps if self.decoding == "whole" else self._cached_steps
        yield from step(ids.masked_fill(~mask, 0), mask, begin)

    def _cached_steps(
        self, ids: Tensor, mask: Tensor, begin: Callable[[], None]
    ) -> Generator[Tensor, Tensor, None]:
        positions = self._positions(mask)
        cache: Arguments = {}
        while True:
            given: Arguments = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1, **cache}
            if self.decoding == "padded":
                given["attention_mask"] = mask.long()
            if self.first_position is not None:
                given["position_ids"] = positions
            begin()
            output = self.network(**accepted_arguments(self.network, given))
            cache = returned_cache(self.network, output)
            tokens = yield output.logits[:, -1]
            ids = tokens.unsqueeze(1)
            positions = positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)

    def _whole_steps(
        self, ids: Tensor, mask: Tensor, begin: Callable[[], None]
    ) -> Generator[Tensor, Tensor, None]:
        lengths = mask.sum(1, keepdim=True)  # (B, 1)
        places = torch.arange(ids.shape[1], device=ids.device)
        shifted = (places + ids.shape[1] - lengths).clamp(max=ids.shape[1] - 1)
        ids = ids.gather(1, shifted)  # rows now start in the first column
        rows = torch.arange(len(ids), device=ids.device)
        while True:
            mask = torch.arange(ids.shape[1], device=ids.device) < lengths
            begin()
            tokens = yield self.logits(self.hidden(ids, mask)[rows, lengths[:, 0] - 1])
            ids = torch.cat([ids, torch.zeros_like(ids[:, :1])], 1).scatter(1, lengths, tokens.unsqueeze(1))
            lengths = lengths + 1


class _FixedTrunk:
    """Replaces a trunk and returns given hidden states; in all else it behaves as the trunk."""

    def __init__(self, trunk: nn.Module, hidden: Tensor):
        self._trunk = trunk
        self._output = _Output(hidden)

    def __call__(self, *_: object, **__: object) -> _Output:
        return self._output

    def __getattr__(self, name: str) -> object:
        return getattr(self._trunk, name)


class _Output(tuple):
    """A trunk's output of any class: the hidden states, and None for any other field."""

    last_hidden_state: Tensor

    def __new__(cls, hidden: Tensor) -> _Output:
        made = super().__new__(cls, (hidden,))
        made.last_hidden_state = hidden
        return made

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def accepted_arguments(module: nn.Module, given: Arguments) -> Arguments:
    """The arguments that a module's forward pass takes by name."""
    names = inspect.signature(module.forward).parameters
    return {name: value for name, value in given.items() if name in names}


def returned_cache(network: PreTrainedModel, output: ModelOutput) -> Arguments:
    """The cache that a pass returned, as arguments of the next pass."""
    names = accepted_arguments(network, dict.fromkeys(CACHES))
    found = {name: getattr(output, name, None) for name in names}
    found = {name: value for name, value in found.items() if value is not None}
    if not found:
        raise ValueError(f"{type(network).__name__} returns no cache")
    return found


def logits_or_hidden(output: ModelOutput) -> Tensor:
    """Logits (B, T, V) of a network, or the hidden states of one without a head."""
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def owner_of(network: nn.Module, module: nn.Module) -> tuple[nn.Module, str]:
    """The parent of a module in a network, and the module's name there."""
    for owner in network.modules():
        for name, child in owner._modules.items():
            if child is module:
                return owner, name
    raise ValueError(f"{type(module).__name__} is not part of {type(network).__name__}")
