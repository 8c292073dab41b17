"""Loads networks and configs from a folder or the Hub; a failure becomes one message that says what to do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as progress

from proxima.base_setup.gguf_files import SMOLLM2, is_gguf, smollm2_path
from proxima.base_setup.gguf_networks import load_gguf_config, load_gguf_network
from proxima.base_setup.nf4_loading import (
    QuantizeError,
    check_forward,
    check_quantization,
    loading_arguments,
    quantization_of,
)
from proxima.core.context_length import context_length
from proxima.core.errors import first_line
from proxima.core.hub import hub_or_cache
from proxima.core.regular_files import check_files
from proxima.runtime import (
    FAST_PATH,
    default_device,
    default_dtype,
    is_out_of_memory,
    noise_problem,
    thread_wait_problem,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

AutoClass: TypeAlias = "type[AutoModelForCausalLM | AutoModelForSequenceClassification]"

EMBEDDED = Path(__file__).parents[1] / "world" / "embedded"
"""Folder of the small model in the package: `model_name="embedded"`."""


class ModelSettings(Protocol):
    """The settings that loading reads; `PPOConfig` and `FinetuningConfig` both have them."""

    model_name: str
    device: str
    trust_remote_code: bool
    lora_r: int
    lora_alpha: int
    lora_dropout: float
    lora_targets: str

    @property
    def dtype(self) -> str: ...

    @property
    def quantize(self) -> str: ...


def model_path(name: str) -> str:
    """The folder, GGUF file or Hub id that a model name stands for."""
    if Path(name).exists():
        return name
    return smollm2_path() if name == SMOLLM2 else str(EMBEDDED) if name == "embedded" else name


@contextmanager
def explain_loading(what: str, name: str) -> Iterator[None]:
    """Turn a loading failure into one message: what failed, why, and what to do offline."""
    with hub_or_cache(model_path(name)) as problem:
        try:
            check_files(model_path(name))
            yield
        except Exception as error:  # for damaged files and odd settings the libraries raise anything
            if is_out_of_memory(error) or isinstance(error, QuantizeError):
                raise
            raise ValueError(explanation(what, name, error, problem)) from error


def explanation(what: str, name: str, error: Exception, problem: str) -> str:
    reason = " ".join(line.strip() for line in str(error).strip().split("\n")[:2]) or type(error).__name__
    if "trust_remote_code" in str(error):
        reason = (
            "it needs Python code that comes with it, which --trust-remote-code "
            "(trust_remote_code=True) would run."
        )
    if problem:
        missing = isinstance(error.__cause__, LocalEntryNotFoundError)
        reason = (
            f"{problem}, and "
            f"{'it was not downloaded before.' if missing else f'of what was downloaded before: {reason}'}"
        )
    where = (
        "a folder on this machine"
        if Path(name).exists()
        else "no folder on this machine, so a Hugging Face id"
    )
    return (
        f"cannot load the {what} {name!r} ({where}): {reason} Offline, give `embedded` (the small model in "
        "the package) or a local folder with config.json, *.safetensors and the tokenizer's files; "
        "HF_HUB_OFFLINE=1 uses only what is already downloaded."
    )


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return default_device()
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {first_line(error)}") from None
    if device.type not in FAST_PATH and (problem := noise_problem(device)):
        raise ValueError(f"device {name!r} cannot be used here: {problem}; use --device cpu")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return default_dtype(device)
    return getattr(torch, name)


def load_network(
    config: ModelSettings,
    name: str,
    device: torch.device,
    kind: AutoClass = AutoModelForCausalLM,
    labels: int = 1,
    trains: bool = False,
) -> PreTrainedModel:
    """A pretrained network, from safetensors or GGUF, without remote code unless the config allows it.

    Args:
        trains: all its weights will train. They are then read as float32, whatever `dtype` says: a weight
            that was rounded first keeps neither what its checkpoint holds nor a small update.
    """
    return load_with_missing(config, name, device, kind, labels, trains)[0]


def load_with_missing(
    config: ModelSettings,
    name: str,
    device: torch.device,
    kind: AutoClass,
    labels: int = 1,
    trains: bool = False,
) -> tuple[PreTrainedModel, set[str]]:
    """The same, and the names of weights that the checkpoint lacks and that are therefore untrained."""
    if device.type == "cpu" and any(problem := thread_wait_problem(torch.get_num_threads())):
        warnings.warn("; ".join(problem), stacklevel=2)
    extra: dict[str, object] = {}
    if kind is AutoModelForSequenceClassification:
        extra["num_labels"] = labels
    dtype = torch.float32 if trains else pick_dtype(config.dtype, device)
    wanted = config.quantize if name == config.model_name else "none"
    if is_gguf(path := model_path(name)):
        with no_progress_bar():
            network, missing = load_gguf_network(path, dtype, kind, device, wanted == "nf4", **extra)
        return network.to(device), missing
    with explain_loading("model", name), no_progress_bar():
        own = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code, **extra)
        if kind is AutoModelForCausalLM and (reason := not_a_language_model(own)):
            raise ValueError(reason)
        saved = quantization_of(own)
        if saved is not None or wanted == "nf4":
            # a frozen network beside the base is taken as it is
            check_quantization(name, saved, wanted if name == config.model_name or trains else "nf4")
            extra = loading_arguments(own, saved, device)
        network, loaded = kind.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **extra,
        )
    if getattr(network.config.get_text_config(), "attn_logit_softcapping", None):
        network.set_attn_implementation("eager")  # transformers' SDPA leaves soft caps out
    network = network.to(device)
    if saved is not None or wanted == "nf4":
        check_forward(network, device)
    return network, set(loaded["missing_keys"])


def not_a_language_model(own: PretrainedConfig) -> str:
    """Why a checkpoint of this config is not a causal language model; empty where it is one."""
    known = own.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if known or "AutoModelForCausalLM" in (getattr(own, "auto_map", None) or {}):
        return ""
    text = own.get_text_config().model_type
    if text != own.model_type:
        return (
            f"it is a {own.model_type!r}, which reads more than text, and of which transformers loads the "
            f"language model ({text!r}) only as a part; give a checkpoint of a language model alone."
        )
    return (
        f"it is a {own.model_type!r}, of which transformers has no causal language model; give a "
        "decoder-only model."
    )


def load_config(name: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """A model's config, without its weights."""
    if is_gguf(path := model_path(name)):
        return load_gguf_config(path)
    with explain_loading("model's config", name):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def load_context_length(name: str, trust_remote_code: bool = False) -> int | None:
    """Most tokens that a model can read, from its config alone; None where it names no limit."""
    return context_length(load_config(name, trust_remote_code))


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bar, which would fill a run's log."""
    shown = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            progress.enable_progress_bar()
