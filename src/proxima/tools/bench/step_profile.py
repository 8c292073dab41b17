"""Which kernels a PPO step spends its time in. In: a trainer and a step's prompts. Out: a table by share."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from proxima.core.json_record import Record, RecordView
from proxima.ppo_trainer import PPOTrainer

KEPT, SHOWN = 40, 12  # kernels in the file and in the table
NAME = 60  # characters


def step_profile(trainer: PPOTrainer, prompts: Sequence[str]) -> Record:
    """One step under torch's profiler: kernels on a GPU, operations of torch on a CPU.

    Returns: `milliseconds` of all of them, and `kernels`, the longest first: `name`, `calls`, `milliseconds`,
        `share`.
    """
    gpu = trainer.models.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
        trainer.ppo_step(prompts)
        if gpu:
            torch.accelerator.synchronize()
    times = {
        each.key: (each.count, (each.self_device_time_total if gpu else each.self_cpu_time_total) / 1000)
        for each in found.key_averages()
    }
    total = sum(milliseconds for _, milliseconds in times.values())
    longest = sorted(times, key=lambda name: -times[name][1])[:KEPT]
    kernels = [
        {
            "name": name,
            "calls": times[name][0],
            "milliseconds": times[name][1],
            "share": times[name][1] / total,
        }
        for name in longest
    ]
    return {"milliseconds": total, "kernels": kernels}


def profile_table(found: RecordView) -> str:
    """The kernels that take the most time."""
    lines = [f"{'kernel':<{NAME}} {'calls':>7} {'ms':>9} {'share':>6}"]
    for each in found["kernels"][:SHOWN]:
        name = re.sub(r"\s+", " ", each["name"])[:NAME]
        lines.append(f"{name:<{NAME}} {each['calls']:>7} {each['milliseconds']:>9.1f} {each['share']:>6.1%}")
    others = 1 - sum(each["share"] for each in found["kernels"][:SHOWN])
    lines.append(f"{'others':<{NAME}} {'':>7} {others * found['milliseconds']:>9.1f} {others:>6.1%}")
    return "\n".join(lines)
