"""Initialises the process group, from what the launcher says and the config's device."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch
from torch import distributed as dist

from proxima.core.errors import ProcessLost
from proxima.runtime.distributed.launch import rank_and_count
from proxima.runtime.distributed.process_group import Processes, first_sentence

_initialized: list[Processes] = []


def init_distributed(device: str = "auto", timeout: float = 1800.0) -> Processes:
    """All processes that were launched together; a single one without a launcher. The first call initialises
    the process group, later calls return it.

    Args:
        device: as in the config; each process takes its own GPU where there are enough.
        timeout: seconds after which a process that does not respond counts as lost.
    """
    if _initialized:
        return _initialized[0]
    rank, count = rank_and_count()
    if count == 1:
        return Processes()
    if ":" in device or device == "mps":
        raise ValueError(f"device {device!r} names one GPU for {count} processes; give `cuda` or `auto`")
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_count = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    gpus = torch.cuda.device_count() if device == "auto" or device.startswith("cuda") else 0
    uses_nccl = gpus >= local_count
    if gpus:
        torch.accelerator.set_device_index(local_rank % gpus)
    backend = "cpu:gloo,cuda:nccl" if uses_nccl else "gloo"
    limit = timedelta(seconds=timeout)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun keeps the store over a restart; a prefix keeps this start from reading old entries
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*address, count, is_master=False, timeout=limit)
            fresh = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
            dist.init_process_group(backend, store=fresh, rank=rank, world_size=count, timeout=limit)
        else:
            dist.init_process_group(backend, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise ProcessLost(
            f"process {rank} of {count} could not connect to the others ({first_sentence(error)})"
        ) from error
    if rank:
        for name in ("proxima", "transformers"):
            logging.getLogger(name).setLevel(logging.ERROR)  # the main process logs for all
    _initialized.append(Processes(rank, count, uses_nccl))
    return _initialized[0]


def is_lost(error: Exception) -> bool:
    """Whether an error means that another process was lost; torch itself may raise it in the middle of a
    pass."""
    is_comm_error = isinstance(error, RuntimeError) and any(
        word in str(error) for word in ("gloo", "NCCL", "Connection closed by peer")
    )
    return isinstance(error, ProcessLost) or (_initialized != [] and is_comm_error)
