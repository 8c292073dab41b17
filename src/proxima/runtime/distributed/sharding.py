"""Sharded weights: FSDP2 over the decoder layers of a network.

A layer is gathered only while it computes. Embeddings, the last norm, the output head and LoRA adapters stay
whole on every process. Every forward pass is then a collective that all processes must join, however many
rows they have: `Lockstep` announces each pass, and a process that has no rows left joins with one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from proxima.runtime.distributed.process_group import Processes


def make_mesh(processes: Processes, kind: str) -> DeviceMesh:
    """A one-dimensional device mesh of all processes. Making it is a collective."""
    if kind == "cuda" and not processes.uses_nccl:
        raise ValueError(
            "shard_base needs a GPU for each process; start as many processes on a machine as it has GPUs"
        )
    return init_device_mesh(kind, (processes.world_size,))


def decoder_layers(network: nn.Module) -> list[nn.Module]:
    """The decoder layers of a network: the `ModuleList` with the most parameters."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(f"{type(network).__name__} has no list of decoder layers to shard or to checkpoint")
    return list(max(lists, key=lambda module: sum(p.numel() for layer in module for p in layer.parameters())))


def shard_network(
    network: nn.Module, decoder: nn.Module, mesh: DeviceMesh, whole: Iterable[nn.Parameter]
) -> None:
    """Shard each decoder layer; gradients are summed, not averaged.

    Args:
        decoder: the module whose forward pass runs the layers.
        whole: parameters inside the layers (adapters) that stay whole on every process.
    """
    layers = decoder_layers(network)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=set(whole))
    fully_shard(
        decoder, mesh=mesh, ignored_params={*whole, *(p for p in network.parameters() if p not in inside)}
    )
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction


def gather_full_tensors(tensors: Iterable[Tensor], processes: Processes) -> Callable[[Tensor], Tensor]:
    """Gather sharded tensors; all processes call it with the same ones.

    Returns: a function that, on the main process, maps a sharded tensor to its full value on the CPU.
    """
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            with processes.collective():
                full = tensor.full_tensor()
            if processes.is_main:
                found[id(tensor)] = full.cpu()
    return lambda tensor: found.get(id(tensor), tensor)


def shard_like(given: Tensor, value: Tensor) -> Tensor:
    """A full value, sharded like `given` where that is sharded."""
    if not isinstance(given, DTensor) or value.shape != given.shape:
        return value
    return distribute_tensor(value.to(given.device), given.device_mesh, given.placements, src_data_rank=None)


@torch.no_grad()
def copy_full_tensor(target: Tensor, value: Tensor) -> None:
    """Copy a full value into a tensor that may be sharded."""
    target.copy_(shard_like(target, value.to(target.dtype)))


class ShardedNetwork(Protocol):
    """What `Lockstep` calls of a backbone."""

    def dummy_pass(self, adapter: str | None, backward: bool) -> None:
        """A pass that changes nothing."""


@dataclass
class Lockstep:
    """Keeps the forward passes of all processes in step."""

    processes: Processes
    passes: list[tuple[ShardedNetwork, str | None]]
    """(backbone, adapter) of every role, in the same order on all processes."""

    def begin(self, backbone: ShardedNetwork, adapter: str | None) -> None:
        """Announce a pass. With gradients on, its backward pass comes before the next announcement."""
        self._agree(1 + 2 * self.passes.index((backbone, adapter)) + torch.is_grad_enabled())

    def join_remaining_passes(self) -> None:
        """Join the passes of other processes until none has one left."""
        while number := self._agree(0):
            backbone, adapter = self.passes[(number - 1) // 2]
            backward = (number - 1) % 2 == 1
            with torch.set_grad_enabled(backward):
                backbone.dummy_pass(adapter, backward)

    def _agree(self, number: int) -> int:
        """The number of the next pass; 0 where no process has one. Processes that have one agree on it."""
        numbers = torch.zeros(self.processes.world_size, dtype=torch.int64)
        numbers[self.processes.rank] = number
        with self.processes.lost_peer_errors():
            dist.all_reduce(numbers)
        if len(wanted := set(numbers.tolist()) - {0}) > 1:
            raise RuntimeError(f"the processes are out of step: passes {sorted(wanted)}")
        return wanted.pop() if wanted else 0
