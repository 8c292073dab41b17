"""Memory, disk and threads compared with what a run will need. In: a config and estimates. Out: findings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from proxima.base_setup import is_adapter, load_config, pick_device
from proxima.config import PPOConfig
from proxima.core.json_record import Record
from proxima.rewards import is_ready_made
from proxima.runtime import device_memory, thread_wait_problem
from proxima.runtime.distributed import rank_and_count
from proxima.tools.doctor.finding import Finding, fail, ok, warn
from proxima.tools.doctor.memory_estimate import GIB, base_without_weights, estimate_memory, free_memory
from proxima.tools.doctor.role_weights import role_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LOGS = 64 * 2**20  # config, metrics, samples and the tokenizer's files
DISK_MARGIN = 2  # a warning below this multiple of what is needed


def check_memory(config: PPOConfig, network: PreTrainedConfig, longest_prompt: int) -> Finding:
    device = pick_device(config.device)
    if device.type not in ("cuda", "cpu"):
        return ok("memory", f"not known for {device.type}")
    on_gpu = device.type == "cuda"
    given: Record = {
        "longest_prompt": longest_prompt,
        "on_gpu": on_gpu,
        "others": other_networks(config),
        "processes": rank_and_count()[1],
        "memory": device_memory(device),
    }
    estimate = estimate_memory(config, network, **given)
    least = estimate_memory(config, network, **given, smallest=True) if on_gpu else estimate
    free = free_memory(device)
    where = "on the GPU" if on_gpu else "in main memory"
    text = (
        f"about {estimate.total / GIB:.1f} GiB at the peak, most of it {estimate.largest}; "
        f"{free / GIB:.1f} GiB free {where}"
    )
    if least.total > free:
        return fail("memory", text, _remedy(config, estimate.largest))
    if estimate.total > free:
        return warn(
            "memory",
            f"{text}: passes will be halved until they fit",
            "lower micro_batch_tokens to save the attempts",
        )
    return ok("memory", text)


def _remedy(config: PPOConfig, largest: str) -> str:
    if largest == "weights" and (config.quantize != "none" or config.lora_r == 0):
        return "use a smaller model"
    return REMEDIES.get(largest, "use a smaller model")


REMEDIES = {
    "weights": "set quantize to nf4 (docs/fourbit.md), or use a smaller model",
    "activations": "set gradient_checkpointing, or lower micro_batch_tokens",
    "cache": "lower batch_size or max_new_tokens",
    "logits": "lower max_new_tokens or micro_batch_tokens",
    "optimizer": "train adapters (lora_r above 0), or lower lora_r",
}


def other_networks(config: PPOConfig) -> list[PreTrainedConfig]:
    """Configs of reward models' networks that are loaded beside the base; one that cannot be read is reported
    when it is loaded."""
    names = []
    for spec in config.rewards:
        is_model = not (spec.is_http or spec.is_function or is_ready_made(spec))
        if isinstance(spec.source, str) and is_model:
            names.append(spec.source)
    found = []
    for name in names:
        if is_adapter(name):
            continue
        try:
            found.append(load_config(name, config.trust_remote_code))
        except ValueError:
            continue
    return found


def check_disk(config: PPOConfig, network: PreTrainedConfig) -> Finding:
    """Space in run_dir for what a run writes: weights of policy and value model, checkpoints (weights and two
    moments), logs."""
    trained = role_weights(config, base_without_weights(config, network, on_gpu=False)).trained
    checkpoints = config.keep_checkpoints + 2  # the best one, and one that is being written
    need = (1 + 3 * checkpoints) * 4 * trained + LOGS
    run_dir = Path(config.run_dir).absolute()
    folder = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free in {config.run_dir}, a run writes about {need / GIB:.2f} GiB"
    if free < need:
        return fail("disk", text, "free some space, or set run_dir to another disk")
    if free < DISK_MARGIN * need:
        return warn("disk", text, "free some space: another run will not fit")
    return ok("disk", text)


def check_threads(config: PPOConfig) -> Finding:
    """Threads that spin while they wait slow a run on a busy CPU down many times."""
    threads = torch.get_num_threads()
    if pick_device(config.device).type != "cpu":
        return ok("threads", "not checked: the run is not on a CPU")
    trouble, advice = thread_wait_problem(threads)
    return (
        warn("threads", trouble, advice)
        if trouble
        else ok("threads", f"{threads}, which sleep soon while they wait")
    )
