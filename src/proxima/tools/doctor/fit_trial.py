"""One trial of `proxima doctor --fit`, in a process of its own.

In: JSON on standard input, with settings, a prompt and the bytes that may be taken. Out: exit status 0 where
a PPO step fitted, 75 where memory ran out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace

import torch

from proxima.base_setup import pick_device
from proxima.config import PPOConfig
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime import is_out_of_memory
from proxima.tools.doctor.fit import OUT_OF_MEMORY
from proxima.tools.doctor.step_checks import unchanging


def limit_memory(device: torch.device, allowed: int) -> None:
    """From now on this process gets no more: private memory on a CPU, torch's own on a GPU."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device.index)
        return
    import resource  # not on Windows

    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def full_step(config: PPOConfig, prompt: str) -> None:
    """A PPO step that learns nothing, in which no response ends before its limit and no pass is halved."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(replace(unchanging(config), run_dir=folder))
        trainer.models.eos_ids = ()
        trainer.models.micro_batches.may_halve = False
        trainer.ppo_step([prompt] * config.batch_size)


def is_refused_memory(error: BaseException) -> bool:
    """Also where torch or the system says so in words of its own."""
    return is_out_of_memory(error) or "allocate memory" in str(error)


def main() -> int:
    given = json.load(sys.stdin)
    config = PPOConfig.from_dict(given["config"])
    try:
        limit_memory(pick_device(config.device), given["allowed"])
        full_step(config, given["prompt"])
    except Exception as error:  # a library that gets no memory may raise anything
        if not is_refused_memory(error):
            raise
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
