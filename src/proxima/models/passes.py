"""`Passes`: a network's own forward pass, as `transformers` wrote it. In: ids and masks. Out: hidden states
and logits.

Networks of many architectures are called in one way here. What differs between them (where the layers end and
the head begins, whether positions may be given, what left padding does) is found out by `probe`, once, never
from a list of names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

CACHES = ("past_key_values", "cache_params", "state")
"""What networks call the memory that they return and take back."""

Decoding = Literal["padded", "grouped", "whole"]
"""How a batch is sampled: prompts padded on the left; prompts of equal length together; without a cache,
the slow way."""


@dataclass(frozen=True)
class Passes:
    """How a network is called."""

    network: Any
    trunk: nn.Module  # embeddings and layers: its output is what the head reads
    owner: (
        nn.Module | None
    )  # the module that calls the trunk; None where the network is the trunk and has no head
    name: str  # of the trunk in its owner
    width: int  # of a hidden state
    vocabulary: int  # logits per position
    first_position: int | None = 0  # of a sequence; None: the network counts by itself
    decoding: Decoding = "padded"

    @staticmethod
    def known(network: Any) -> Passes:
        """For an architecture of which nothing must be found out."""
        trunk, config = network.base_model, network.config.get_text_config()
        if trunk is network:
            return Passes(network, network, None, "", config.hidden_size, 0)
        owner, name = owner_of(network, trunk)
        return Passes(
            network, trunk, owner, name, config.hidden_size, len(network.get_output_embeddings().weight)
        )

    # --- whole sequences ---

    def inputs(self, module: nn.Module, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        """Arguments for a whole-sequence pass.

        Pad ids never reach the network: where the mask is off it reads token 0.
        """
        given: dict[str, Any] = {
            "input_ids": ids.masked_fill(~mask, 0),
            "attention_mask": mask.long(),
            "use_cache": False,
        }
        if self.first_position is not None:
            given["position_ids"] = self._positions(mask)
        return accepted(module, given)

    def _positions(self, mask: Tensor) -> Tensor:
        return (mask.cumsum(1) - 1).clamp(min=0) + (self.first_position or 0)

    def hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states (B, T, D)."""
        return self.trunk(**self.inputs(self.trunk, ids, mask))[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, D), by whatever the network itself does after its layers."""
        assert self.owner is not None
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        modules: dict[str, Any] = self.owner._modules
        modules[self.name] = _Given(self.trunk, hidden.unsqueeze(0))
        try:
            return read(self.network(**accepted(self.network, {"input_ids": ids, "use_cache": False})))[0]
        finally:
            modules[self.name] = self.trunk

    # --- one token at a time ---

    def steps(
        self, ids: Tensor, mask: Tensor, begin: Callable[[], None] = lambda: None
    ) -> Generator[Tensor, Tensor, None]:
        """Logits (B, V) of the next token; send it the tokens (B,) that were chosen.

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
        cache: dict[str, Any] = {}
        while True:
            given: dict[str, Any] = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1, **cache}
            if self.decoding == "padded":
                given["attention_mask"] = mask.long()
            if self.first_position is not None:
                given["position_ids"] = positions
            begin()
            output = self.network(**accepted(self.network, given))
            cache = kept_cache(self.network, output)
            tokens = yield output.logits[:, -1]
            ids, positions = tokens.unsqueeze(1), positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)

    def _whole_steps(
        self, ids: Tensor, mask: Tensor, begin: Callable[[], None]
    ) -> Generator[Tensor, Tensor, None]:
        lengths = mask.sum(1, keepdim=True)  # (B, 1)
        places = torch.arange(ids.shape[1], device=ids.device)
        ids = ids.gather(
            1, (places + ids.shape[1] - lengths).clamp(max=ids.shape[1] - 1)
        )  # from the first column
        rows = torch.arange(len(ids), device=ids.device)
        while True:
            mask = torch.arange(ids.shape[1], device=ids.device) < lengths
            begin()
            tokens = yield self.logits(self.hidden(ids, mask)[rows, lengths[:, 0] - 1])
            ids = torch.cat([ids, torch.zeros_like(ids[:, :1])], 1).scatter(1, lengths, tokens.unsqueeze(1))
            lengths = lengths + 1

    def but(self, **changes: Any) -> Passes:
        return replace(self, **changes)


class _Given:
    """Stands in a trunk's place and returns given hidden states; in all else it is the trunk."""

    def __init__(self, trunk: nn.Module, hidden: Tensor):
        self._trunk, self._output = trunk, _Output(hidden)

    def __call__(self, *_: Any, **__: Any) -> _Output:
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)


class _Output(tuple):
    """A trunk's output of any class: the hidden states, and None for whatever else is asked for."""

    last_hidden_state: Tensor

    def __new__(cls, hidden: Tensor) -> _Output:
        made = super().__new__(cls, (hidden,))
        made.last_hidden_state = hidden
        return made

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def accepted(module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a module's forward pass names."""
    names = inspect.signature(module.forward).parameters
    return {name: value for name, value in given.items() if name in names}


def kept_cache(network: Any, output: Any) -> dict[str, Any]:
    """What a pass gave for the next one to go on from."""
    names = accepted(network, dict.fromkeys(CACHES))
    found = {name: getattr(output, name, None) for name in names}
    found = {name: value for name, value in found.items() if value is not None}
    if not found:
        raise ValueError(f"{type(network).__name__} keeps no cache")
    return found


def read(output: Any) -> Tensor:
    """Logits (B, T, V) of a network, or the hidden states of one without a head."""
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def owner_of(network: nn.Module, module: nn.Module) -> tuple[nn.Module, str]:
    """The module in a network that holds another, and its name there."""
    for owner in network.modules():
        for name, child in owner._modules.items():
            if child is module:
                return owner, name
    raise ValueError(f"{type(module).__name__} is no part of {type(network).__name__}")
