"""Gradient synchronisation: the sum over all processes, with the same bits on each.

Losses are divided by the whole minibatch's tokens before the backward pass, so gradients are summed, never
averaged. FSDP sums the gradients of sharded weights (DTensor) in the backward pass; they are skipped here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from proxima.runtime.distributed.process_group import Processes

BUCKET = 64 * 2**20  # bytes per all-reduce


def all_reduce_gradients(parameters: list[nn.Parameter], processes: Processes) -> None:
    """Replace each gradient by its sum over all processes. One that is None on all processes stays None."""
    if not processes.is_distributed:
        return
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    if not whole:
        return
    present = torch.tensor([parameter.grad is not None for parameter in whole], dtype=torch.uint8)
    present = processes.all_reduce(present, dist.ReduceOp.MAX)
    used = [parameter for parameter, here in zip(whole, present.tolist(), strict=True) if here]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([parameter.grad for parameter in used if parameter.grad is not None]):
        flat = processes.all_reduce(torch.cat([gradient.flatten() for gradient in bucket]))
        sums = flat.split([gradient.numel() for gradient in bucket])
        for gradient, summed in zip(bucket, sums, strict=True):
            gradient.copy_(summed.view_as(gradient))


def clip_gradients(parameters: list[nn.Parameter], limit: float, processes: Processes) -> Tensor:
    """Scale all gradients so that their norm is at most `limit`; returns the norm before.

    The formula is that of `torch.nn.utils.clip_grad_norm_`.
    """
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return nn.utils.clip_grad_norm_(parameters, limit).detach()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    parts = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norm = (processes.all_reduce(_squares(parts)) + _squares(whole)).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*parts, *whole):
        gradient.mul_(factor)
    return norm


def _squares(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum() if tensors else torch.zeros(())


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Groups of one dtype of at most `BUCKET` bytes each; a larger tensor is a group of its own."""
    groups: list[list[Tensor]] = []
    left = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if not groups or size > left or groups[-1][0].dtype != gradient.dtype:
            groups.append([])
            left = BUCKET
        groups[-1].append(gradient)
        left -= size
    return groups
