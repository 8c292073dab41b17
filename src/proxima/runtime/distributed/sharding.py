"""Weights sharded over processes with FSDP2. In: a network. Out: its decoder layers in parts, one a process.

A layer is put together for as long as it computes. Embeddings, the last norm, the output head and LoRA
adapters stay whole on every process. A forward pass is then an exchange that all processes must take part in,
however many rows they have: `Lockstep` says before each pass which one it is, and who has nothing left to do
joins in with a single token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from proxima.runtime.distributed.process_group import Processes


def make_mesh(processes: Processes, kind: str) -> DeviceMesh:
    """One dimension of all processes; an exchange by itself."""
    if kind == "cuda" and not processes.direct:
        raise ValueError(
            "shard_base needs a GPU for each process; start as many processes on a machine as it has GPUs"
        )
    return init_device_mesh(kind, (processes.world_size,))


def decoder_layers(network: nn.Module) -> list[nn.Module]:
    """The largest list of modules in a network: its layers, which need not be of one kind."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(
            f"{type(network).__name__} has no list of decoder layers to shard or to compute again"
        )
    return list(max(lists, key=lambda module: sum(p.numel() for layer in module for p in layer.parameters())))


def shard_network(
    network: nn.Module, decoder: nn.Module, mesh: DeviceMesh, whole: Iterable[nn.Parameter]
) -> None:
    """Shard the decoder's layers, each by itself; gradients are added up, not averaged.

    Args:
        decoder: the part of the network whose call runs the layers.
        whole: parameters in the layers (adapters) that stay on every process.
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
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def put_together(tensors: Iterable[Tensor], processes: Processes) -> Callable[[Tensor], Tensor]:
    """All processes call it with the same tensors; on the first, the function gives the whole of a sharded
    one, on the CPU."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            with processes.exchange():
                whole = tensor.full_tensor()
            if processes.is_main:
                found[id(tensor)] = whole.cpu()
    return lambda tensor: found.get(id(tensor), tensor)


def like(given: Tensor, value: Tensor) -> Tensor:
    """A whole value as `given` is: sharded in the same way where that is sharded."""
    if not isinstance(given, DTensor) or value.shape != given.shape:
        return value
    return distribute_tensor(value.to(given.device), given.device_mesh, given.placements, src_data_rank=None)


@torch.no_grad()
def fill(target: Tensor, value: Tensor) -> None:
    """Copy a whole value into a tensor, sharded or not."""
    target.copy_(like(target, value.to(target.dtype)))


@dataclass
class Lockstep:
    """Keeps the forward passes of all processes in step."""

    processes: Processes
    passes: list[tuple[Any, str | None]]
    """(backbone, adapter) of every role, in the same order on all processes."""

    def begin(self, backbone: Any, adapter: str | None) -> None:
        """Called before a pass. With gradients on, its backward follows before the next one."""
        self._agree(1 + 2 * self.passes.index((backbone, adapter)) + torch.is_grad_enabled())

    def settle(self) -> None:
        """Join in until nobody has a pass left."""
        while number := self._agree(0):
            (backbone, adapter), backward = self.passes[(number - 1) // 2], (number - 1) % 2 == 1
            with torch.set_grad_enabled(backward):
                backbone.single_token_pass(adapter, backward)

    def _agree(self, number: int) -> int:
        """The pass that comes next: 0 for nobody. Processes that have one have the same."""
        numbers = torch.zeros(self.processes.world_size, dtype=torch.int64)
        numbers[self.processes.rank] = number
        with self.processes.contact():
            dist.all_reduce(numbers)
        if len(wanted := set(numbers.tolist()) - {0}) > 1:
            raise RuntimeError(f"the processes are out of step: passes {sorted(wanted)}")
        return wanted.pop() if wanted else 0
