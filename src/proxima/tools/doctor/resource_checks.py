"""Memory, disk and threads compared with what a run will need; what recorded steps take. In: a config and
estimates. Out: findings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from proxima.base_setup import config_number, is_adapter, load_config, pick_device
from proxima.config import PPOConfig
from proxima.core.json_record import Record
from proxima.core.recorded_experts import expert_dtype
from proxima.ppo_trainer import MOST_KEPT, OWN_VALUE_NETWORK, recorded_bytes, too_large
from proxima.rewards import is_ready_made
from proxima.runtime import device_memory, thread_wait_problem
from proxima.runtime.distributed import rank_and_count
from proxima.runtime.engine import knows
from proxima.tools.doctor.finding import Finding, fail, ok, warn
from proxima.tools.doctor.memory_estimate import GIB, base_without_weights, estimate_memory, free_memory
from proxima.tools.doctor.role_weights import role_weights, trained_reward, value_network

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
    moments), logs; and for recorded steps, without which a run continues."""
    trained = role_weights(config, base_without_weights(config, network, on_gpu=False)).trained
    checkpoints = config.keep_checkpoints + 2  # the best one, and one that is being written
    need = (1 + 3 * checkpoints) * 4 * trained + LOGS
    run_dir = Path(config.run_dir).absolute()
    folder = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free in {config.run_dir}, a run writes about {need / GIB:.2f} GiB"
    recorded = MOST_KEPT * sum(bundle_bytes(config, network)) if config.record_steps else 0
    if recorded:
        text += f" and up to {recorded / GIB:.2f} GiB of recorded steps"
    if free < need:
        return fail("disk", text, "free some space, or set run_dir to another disk")
    if free < DISK_MARGIN * need:
        return warn("disk", text, "free some space: another run will not fit")
    if free < need + recorded:
        return warn("disk", text, "free some space: a step that does not fit is not recorded")
    return ok("disk", text)


def check_recording(config: PPOConfig, network: PreTrainedConfig) -> list[Finding]:
    """What a recorded step takes, or why none can be recorded; nothing where none are."""
    if not config.record_steps:
        return []
    name, problem = "recorded steps", ""
    if config.has_critic and config.value_model != "policy":
        own = value_network(config, trained_reward(config))
        problem = "" if own is None else OWN_VALUE_NETWORK
    adapters, rollout = (0, 0) if problem else bundle_bytes(config, network)
    if problem := problem or too_large(adapters, rollout):
        what, _, advice = problem.partition("; ")
        return [fail(name, what, advice)]
    held = 2 * (3 * adapters // 4 + rollout)  # of two steps, without the weights after them
    return [
        ok(
            name,
            f"up to {(adapters + rollout) / GIB:.2f} GiB each without its prompts, at most {MOST_KEPT} stay; "
            f"up to {held / GIB:.2f} GiB of main memory stay in use",
        )
    ]


def bundle_bytes(config: PPOConfig, network: PreTrainedConfig) -> tuple[int, int]:
    """What a recorded step takes for its adapters and for its responses, without a network's weights."""
    base, text = base_without_weights(config, network, on_gpu=False), network.get_text_config()
    roles, vocabulary = role_weights(config, base), base.get_input_embeddings().num_embeddings
    is_fast = config.engine != "plain" and knows(base)  # the reference path records no experts
    per_layer = config_number(text, "num_experts_per_tok") if is_fast else 0
    width = expert_dtype(config_number(text, "num_experts")).itemsize
    experts = config_number(text, "num_hidden_layers") * per_layer * width
    return recorded_bytes(config, 4 * roles.trained, 4 * roles.reference, vocabulary, experts)


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
