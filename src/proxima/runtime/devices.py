"""What differs between the devices that torch can train on: CPU, CUDA, Apple's MPS, others by torch's own
interface.

MPS has no float64, its random state is one tensor that `fork_rng` does not know, and it reports a lack of
memory as a plain RuntimeError.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from proxima.core.errors import first_line
from proxima.core.sampling import gumbel_noise
from proxima.runtime.distributed import rank_and_count

log = logging.getLogger(__name__)
FAST_PATH = ("cpu", "cuda")
"""Devices that the fast path has run on; on any other, networks run by `transformers`' own forward pass."""


def accelerator() -> torch.device | None:
    """The kind of accelerator that torch finds on this machine, if any."""
    return torch.accelerator.current_accelerator(check_available=True)


def default_device() -> torch.device:
    """What `auto` stands for: CUDA, else another accelerator where it computes what a CPU computes, else the
    CPU. Several processes share no other accelerator than CUDA."""
    device = accelerator()
    if device is not None and device.type == "cuda":
        return device
    if device is None or rank_and_count()[1] > 1:
        return torch.device("cpu")
    if problem := noise_problem(device):
        log.warning("device auto is the CPU, not %s: %s", device.type, problem)
        return torch.device("cpu")
    return device


@cache
def noise_problem(device: torch.device) -> str:
    """Why sampling on a device would not follow from the seed as on a CPU; empty where it would. Its noise is
    a hash on 64-bit integers, which a device may lack or round."""
    keys = torch.tensor([[2**31 + 7, 2**32 - 5]])
    tokens = torch.arange(64)[None]
    try:
        found = gumbel_noise(keys.to(device), tokens.to(device)).cpu()
    except (RuntimeError, TypeError) as error:
        return f"it cannot compute the sampling noise ({first_line(error)})"
    same = torch.allclose(found, gumbel_noise(keys, tokens), rtol=1e-4, atol=1e-5)
    return "" if same else "it computes other sampling noise than a CPU (64-bit integers)"


@cache
def default_dtype(device: torch.device) -> torch.dtype:
    """What `dtype: auto` stands for: bfloat16 on CUDA, and on another accelerator where a product of it
    works; else float32."""
    if device.type not in FAST_PATH:
        try:
            ones = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
            return torch.bfloat16 if (ones @ ones).float().sum().item() == 512 else torch.float32
        except (RuntimeError, TypeError) as error:
            log.info("weights are float32: no bfloat16 here (%s)", first_line(error))
            return torch.float32
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def device_memory(device: torch.device) -> int | None:
    """Bytes that a process may take of a device in all, of a CPU's what the machine or a container has; None
    where they are not known. It does not depend on what is free at the moment."""
    if device.type == "cuda":
        # its index, or the current device's: a device without one is refused here
        share = torch.cuda.get_per_process_memory_fraction(device.index)
        return int(share * torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    amounts = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()]
    return min([*amounts, int(text)] if text.isdecimal() else amounts)


def _limits() -> list[int]:
    """Bytes that this process may take by `ulimit`; `proxima doctor --fit` sets one for its trials."""
    import resource  # not on Windows

    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return [limit for limit in limits if limit != resource.RLIM_INFINITY]


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device or of the machine."""
    own = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return own or (isinstance(error, RuntimeError) and "MPS backend out of memory" in str(error))


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_cached_memory() -> None:
    """Give back what torch keeps for later, on whichever accelerator there is."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def random_states() -> dict[str, Tensor]:
    """The random state of every accelerator, by `cuda.0`, `cuda.1`, …, or `mps.0`."""
    device = accelerator()
    if device is None:
        return {}
    if device.type == "mps":
        return {"mps.0": torch.mps.get_rng_state()}
    states = torch.get_device_module(device).get_rng_state_all()
    return {f"{device.type}.{index}": state for index, state in enumerate(states)}


def used_random_states() -> dict[str, Tensor]:
    """The same, but nothing where the accelerator has not been used: to ask would start it."""
    device = accelerator()
    is_used = getattr(device and torch.get_device_module(device), "is_initialized", lambda: True)
    return random_states() if is_used() else {}


def set_random_states(states: dict[str, Tensor]) -> None:
    """Those of accelerators that are not here are left out."""
    device = accelerator()
    for name, state in states.items():
        kind, index = name.split(".")
        if device is None or kind != device.type or int(index) >= torch.accelerator.device_count():
            continue
        if kind == "mps":
            torch.mps.set_rng_state(state.clone())
        else:
            torch.get_device_module(device).set_rng_state(state.clone(), int(index))


@contextmanager
def forked_random_state(device: torch.device) -> Iterator[None]:
    """Whatever the block draws, the random states of the CPU and of this device are afterwards as they were
    before."""
    before = torch.mps.get_rng_state() if device.type == "mps" else None
    known = device.type not in ("cpu", "mps")
    forked = {"devices": [device], "device_type": device.type} if known else {"devices": []}
    with torch.random.fork_rng(**forked):
        try:
            yield
        finally:
            if before is not None:
                torch.mps.set_rng_state(before)
