"""How processes find each other.

In: what started them says, and a config's device. Out: `Processes`, the same group on all.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch
from torch import distributed as dist

from proxima.core.errors import ProcessLost
from proxima.runtime.distributed.launch import rank_and_count
from proxima.runtime.distributed.process_group import Processes, first_sentence

_joined: list[Processes] = []


def init_distributed(device: str = "auto", timeout: float = 1800.0) -> Processes:
    """All processes that were started together, met the first time this is called; a process by itself where
    it is alone.

    Args:
        device: a config's; each process takes a GPU of its own where there are enough.
        timeout: seconds after which a process that does not answer counts as lost.
    """
    if _joined:
        return _joined[0]
    rank, count = rank_and_count()
    if count == 1:
        return Processes()
    if ":" in device:
        raise ValueError(f"device {device!r} names one GPU for {count} processes; give `cuda` or `auto`")
    local, beside = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", count))
    gpus = torch.cuda.device_count() if device == "auto" or device.startswith("cuda") else 0
    direct = gpus >= beside
    if gpus:
        torch.cuda.set_device(local % gpus)
    backend, limit = "cpu:gloo,cuda:nccl" if direct else "gloo", timedelta(seconds=timeout)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun keeps what processes told each other before a restart; a new start must not read it
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*address, count, is_master=False, timeout=limit)
            fresh = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
            dist.init_process_group(backend, store=fresh, rank=rank, world_size=count, timeout=limit)
        else:
            dist.init_process_group(backend, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise ProcessLost(
            f"process {rank} of {count} could not meet the others ({first_sentence(error)})"
        ) from error
    if rank:
        for name in ("proxima", "transformers"):
            logging.getLogger(name).setLevel(logging.ERROR)  # the first process says what there is to say
    _joined.append(Processes(rank, count, direct))
    return _joined[0]


def is_lost(error: Exception) -> bool:
    """Whether an error says that another process was lost, also where torch itself raised it in the middle
    of a pass."""
    told = isinstance(error, RuntimeError) and any(
        word in str(error) for word in ("gloo", "NCCL", "Connection closed by peer")
    )
    return isinstance(error, ProcessLost) or (_joined != [] and told)
