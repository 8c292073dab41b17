"""Settings to recompute a step by. In: a bundle, perhaps a stranger's. Out: settings that call nothing which
the bundle alone names, and its adapters in a folder, as the trainer loads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from proxima.base_setup import adapter_size, has_head, load_config, lora_config
from proxima.config import PPOConfig, RewardSpec
from proxima.core.json_record import Record
from proxima.models import ADAPTER_FILE, HEAD_FILE
from proxima.rewards import READY_MADE, reads_environments
from proxima.runs import Bundle
from proxima.runtime import accelerator
from proxima.tools.doctor import without_weights

MOST_TIMES = 4  # the weights that a bundle holds of an adapter; some of a model's layers take none
MOST_EPOCHS = 100  # that are believed without a minibatch of theirs
PLAIN_NAME = re.compile(r"[\w.-]+")


class RecordedEnvironment:
    """Stands where an environment stood, whose answers are among the tokens: nobody calls it."""

    def step(self, text: str) -> None:
        raise NotImplementedError("recorded episodes are over")


def recorded_tool() -> None:
    """
    Stands where tools stood, whose answers are among the tokens: nobody calls it.
    """
    raise NotImplementedError("recorded episodes are over")


def replay_config(
    bundle: Bundle, folder: Path, model: str, rewards: Sequence[RewardSpec], device: str
) -> tuple[PPOConfig, bool]:
    """The settings to recompute by, and whether rewards are asked again.

    Nothing of the bundle is called that its settings alone name: no function, no environment or tool,
    no server, no tracker.

    Args:
        folder: where the recorded adapters are put for the trainer to load.
    """
    try:
        recorded = PPOConfig.from_dict(bundle.facts["settings"])
    except ValueError as error:
        raise ValueError(f"{bundle.path}: its settings cannot be used: {error}") from None
    if recorded.not_recordable:
        raise ValueError(f"{bundle.path}: {recorded.not_recordable}")
    if recorded.has_episodes and any(map(reads_environments, rewards)):
        raise ValueError("rewards that read environments cannot be asked again: these are not recorded")
    asked = tuple(rewards) or (recorded.rewards if all(map(is_ready_made, recorded.rewards)) else ())
    asks = bool(asked) or bool(recorded.environment and not recorded.rewards)  # its rewards are recorded
    changes: Record = {
        "model_name": model or str(bundle.facts["base"].get("name") or recorded.model_name),
        "sft_adapter": _write_adapter(bundle, "reference", folder) if bundle.group("reference") else "",
        "rewards": asked,
        "environment": tuple(
            RewardSpec(RecordedEnvironment, each.weight, each.label) for each in recorded.environment
        ),
        "tools": (RewardSpec(recorded_tool),) if recorded.tools and not recorded.environment else (),
        "judges": (),
        "trackers": (),
        "device": device or _device(str(bundle.facts["device"])),
        "dtype": bundle.facts["dtype"],
        "record_steps": 0,
        "trust_remote_code": False,
    }
    if recorded.engine == "vllm":
        changes |= {"engine": "auto", "engine_urls": (), "overlap": False}
    if bundle.group("before/value"):
        changes["value_model"] = _write_adapter(bundle, "value", folder)
    elif recorded.has_critic:
        changes["value_model"] = "policy"
    _check_sizes(recorded, bundle)
    return replace(recorded, **changes), asks


def check_adapter_sizes(config: PPOConfig, bundle: Bundle) -> None:
    """Adapters of these ranks, on all that they name of this model, take about what the bundle holds of them;
    refused before they are made."""
    network = load_config(config.model_name, config.trust_remote_code)
    asked = [] if config.sft_adapter else [("before/policy", config.lora_r, config.lora_targets)]
    for group, role in (("reference", "reference"), ("before/value", "value")):
        settings = bundle.facts["adapters"].get(role) if bundle.group(group) else None
        if settings and (names := settings.get("target_modules")):
            asked.append((group, settings["r"], ",".join(names)))
    for group, rank, targets in asked:
        held = sum(tensor.numel() for tensor in bundle.group(group).values())
        try:
            built = without_weights(AutoModelForCausalLM, network)
            of_rank_1 = lora_config(replace(config, lora_r=1, lora_targets=targets), built)
            wanted = rank * adapter_size(built, of_rank_1)
        except ValueError:  # an architecture whose layers are not known without its weights
            continue
        if wanted > MOST_TIMES * held:
            raise ValueError(
                f"{bundle.path}: adapters of rank {rank} would have {wanted:,} weights on this model, and "
                f"{group} holds {held:,}"
            )


def is_ready_made(spec: RewardSpec) -> bool:
    """Whether it is a reward of the package: no code, model or server of anybody else's."""
    return isinstance(spec.source, str) and spec.source in READY_MADE and not has_head(spec.source)


def _device(recorded: str) -> str:
    device = accelerator()
    there = ("cpu",) if device is None else ("cpu", device.type)
    return recorded if recorded in there else "auto"


def _check_sizes(config: PPOConfig, bundle: Bundle) -> None:
    """Settings that would make larger adapters, more responses or more updates than the bundle holds, or
    that ask for episodes it does not hold, are refused before they do."""
    if config.has_episodes != bool(bundle.facts.get("episodes")):
        raise ValueError(f"{bundle.path}: its episodes do not fit the environment and tools of its settings")
    policy = bundle.group("before/policy")
    ranks = [len(tensor) for name, tensor in policy.items() if ".lora_A." in name and tensor.ndim]
    if not ranks or (not config.sft_adapter and config.lora_r > max(ranks)):
        raise ValueError(
            f"{bundle.path}: its adapters do not have the rank of its settings ({config.lora_r})"
        )
    sequences, updates = len(bundle.tensors["tokens/mask"]), bundle.group("update")
    if sequences % config.num_generations:
        raise ValueError(f"{bundle.path}: {sequences} responses are not {config.num_generations} per prompt")
    taken = max((len(each) for each in updates.values()), default=0)
    if "stopped" not in updates and max(config.ppo_epochs, config.value_epochs) > max(taken, MOST_EPOCHS):
        raise ValueError(f"{bundle.path}: its settings ask for more epochs than it has minibatches")


def _write_adapter(bundle: Bundle, role: str, folder: Path) -> str:
    """A recorded adapter as PEFT reads it, with settings that have been checked one by one."""
    group = "reference" if role == "reference" else f"before/{role}"
    tensors, settings = bundle.group(group), bundle.facts["adapters"].get(role)
    own = folder / role
    own.mkdir()
    plain = {"peft_type": "LORA", **_checked_settings(settings, tensors, bundle)}
    (own / "adapter_config.json").write_text(json.dumps(plain), encoding="utf-8")
    save_file(tensors, own / ADAPTER_FILE)
    if head := bundle.group(f"before/{role}_head"):
        save_file(head, own / HEAD_FILE)
    return str(own)


def _checked_settings(settings: object, tensors: Mapping[str, Tensor], bundle: Bundle) -> Record:
    def names(value: object) -> bool:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)

    def pattern(value: object) -> bool:
        return isinstance(value, dict) and all(
            PLAIN_NAME.fullmatch(key) and type(each) in (int, float) for key, each in value.items()
        )

    def ranks(value: object) -> bool:
        return isinstance(value, dict) and pattern(value) and all(map(is_rank, value.values()))

    def is_rank(value: object) -> bool:
        return type(value) is int and 0 < value <= max(rank, 1)

    rank = max((len(each) for name, each in tensors.items() if ".lora_A." in name and each.ndim), default=0)
    checks = {
        "r": is_rank,
        "lora_alpha": lambda value: type(value) in (int, float),
        "task_type": lambda value: value in ("CAUSAL_LM", None),
        "bias": lambda value: value in ("none", "all", "lora_only"),
        **dict.fromkeys(("target_modules", "exclude_modules", "modules_to_save", "target_parameters"), names),
        **{"rank_pattern": ranks, "alpha_pattern": pattern},
        **dict.fromkeys(("fan_in_fan_out", "use_rslora", "use_dora"), lambda value: type(value) is bool),
    }
    given = settings if isinstance(settings, dict) else {}
    if odd := [name for name, value in given.items() if name not in checks or not checks[name](value)]:
        raise ValueError(
            f"{bundle.path}: its adapter has the setting {odd[0]} = {given[odd[0]]!r}, which is none"
        )
    if "r" not in given:
        raise ValueError(f"{bundle.path}: it does not say what rank its adapters have")
    return given
