"""Optimisers and random states without pickle. In: live objects. Out: safetensors and JSON; and back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from proxima.core.json_record import Record
from proxima.runtime import random_states, set_random_states, used_random_states
from proxima.runtime.distributed import shard_like


def save_optimizer(
    optimizer: torch.optim.Optimizer, path: Path, whole: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The tensors of `optimizer_tensors` in a file. Learning rates are not stored: they are set at each
    step.

    Args:
        whole: gives the whole of a tensor, where it is sharded over processes.
    """
    tensors = optimizer_tensors(optimizer)
    save_file({name: whole(value).detach().cpu().contiguous() for name, value in tensors.items()}, path)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every state tensor by its parameter's place: `12.exp_avg`."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    fill_optimizer(optimizer, load_file(path))


def fill_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set exactly these states, as `optimizer_tensors` names them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        own = shard_like(parameters[int(index)], value.clone())  # its own memory, not a view of the file
        state.setdefault(int(index), {})[key] = own
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def save_random_tensors(path: Path) -> None:
    """Torch's generators."""
    save_file({"cpu": torch.get_rng_state(), **random_states()}, path)


def random_numbers() -> Record:
    """Python's and numpy's generators.

    Sampling needs none of them (its noise follows from seed and step); rewards may.
    """
    import numpy as np

    name, keys, *rest = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest]}  # type: ignore[union-attr]


def load_random_state(path: Path, plain: Record) -> None:
    tensors = load_file(path)
    set_random_state({**plain, "torch": tensors.pop("cpu").tolist()})
    set_random_states(tensors)


def set_random_state(plain: Record) -> None:
    """Python's, numpy's and torch's CPU generators, from plain values."""
    import numpy as np

    torch.set_rng_state(torch.tensor(plain["torch"], dtype=torch.uint8))
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = plain["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


@contextmanager
def same_random_state() -> Iterator[None]:
    """Whatever the block draws from torch's, Python's and numpy's generators, they are afterwards as they
    were before."""
    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()
    cpu, others = torch.get_rng_state(), used_random_states()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        set_random_states(others)
        random.setstate(python)
        np.random.set_state(numpy)
