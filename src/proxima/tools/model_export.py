"""`proxima export`: adapters and merged models for other tools, and their model card.

In: a run's folder. Out: an adapter or a merged model, its tokenizer and a model card.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import yaml
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors import SafetensorError, safe_open
from torch import Tensor

from proxima.base_setup import (
    is_adapter,
    load_adapter,
    load_config,
    load_network,
    load_tokenizer,
    model_path,
    no_progress_bar,
    pick_device,
)
from proxima.config import FinetuningConfig, PPOConfig, saved_settings, settings_in
from proxima.core.json_record import Record
from proxima.core.linear4bit import dequantize_layers
from proxima.core.terminal_text import without_lone_surrogates
from proxima.models import HEAD_FILE, Backbone
from proxima.runs import LIVE_FILES, Run, first_step_row
from proxima.tools.gguf_export import as_stored, check_architecture, write_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENOUGH = 0.9  # warn if a merged model keeps a smaller share of the update
NOT_THE_ORIGINAL = (
    "the adapter was trained on a base in 4 bits (nf4) and is merged into that base, dequantised: this is "
    "not the original model with an update, its weights are rounded to 4 bits first"
)
RESULTS = ("avg_reward", "kl", "response_length", "eos_rate", "validation/reward")


def export(
    run: str | Path,
    to: str | Path,
    merge: bool = False,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    gguf: Literal["f16", "q8_0"] | None = None,
) -> Path:
    """
    Args:
        run: folder of `proxima train` (its policy is taken) or `proxima sft`.
        to: a folder that does not exist yet, or is empty.
        merge: write one model without an adapter, merged in float32 and saved as `dtype` (auto = the base's
            own); warns if rounding loses much of the update.
        trust_remote_code: run Python code that comes with the base. The run's own setting does not count: the
            run may come from a stranger.
        gguf: write one merged GGUF file in this form instead of a folder; `to` ends with .gguf.
    """
    run, to = Path(run), Path(to)
    weights = run / "policy" if (run / "policy").is_dir() else run
    config = _config(run)
    if (weights / HEAD_FILE).is_file():
        raise ValueError(
            f"{weights} is a reward or value model, export takes a policy; `proxima serve-reward` serves a "
            "reward model"
        )
    if gguf and (to.suffix != ".gguf" or dtype != "auto"):
        raise ValueError(
            f"with --gguf, give a file NAME.gguf (got {str(to)!r}) and no --dtype (got {dtype!r})"
        )
    if to.exists() and (gguf or not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"{to} already exists; choose a new {'file' if gguf else 'folder'}")
    if not is_adapter(weights) and not (weights / "config.json").is_file():
        raise ValueError(f"{weights} holds neither an adapter nor a model")
    _check_weights(weights)
    if to.resolve().is_relative_to(weights.resolve()):
        raise ValueError(f"{to} lies in the folder that is exported; choose another")
    config = replace(config, trust_remote_code=trust_remote_code, dtype=_trained_dtype(run, config))
    if gguf:
        _write_gguf(weights, to, config, gguf, run.resolve().name)
        return to
    card = model_card(run, config, merge or not is_adapter(weights))
    to.parent.mkdir(parents=True, exist_ok=True)
    # `to` is complete or does not exist
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as folder:
        part = Path(folder) / "part"
        _write_weights(weights, part, config, merge, dtype)
        (part / "README.md").write_text(without_lone_surrogates(card), encoding="utf-8")
        part.replace(to)
    return to


def _check_weights(folder: Path) -> None:
    """The weights exist, are complete and are safetensors; no file is a link to one outside the run."""
    for path in folder.rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is a pipe or a device, not a file; remove it")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path} is a link that leads out of the run; put the file itself there")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no weights (*.safetensors)")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(f"the weights in {file} cannot be read: {error}") from None


def _write_weights(
    weights: Path, to: Path, config: PPOConfig | FinetuningConfig, merge: bool, dtype: str
) -> None:
    if is_adapter(weights) and merge:
        kind = _saved_dtype(config, dtype)
        name = str(kind).removeprefix("torch.")
        network = _merged(
            weights, config, lambda weight: weight.to(kind).float(), f"{name}; merge with --dtype float32"
        )
        with no_progress_bar():
            network.to(kind).save_pretrained(to)
        load_tokenizer(config.model_name, config.trust_remote_code).save_pretrained(to)
    else:
        _copy_files(weights, to, without=("README.md", "*.yaml", *LIVE_FILES))


def _copy_files(folder: Path, to: Path, without: Sequence[str]) -> None:
    """As new files: who may read them, the umask says, whatever those of the run allow."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in without):
            place = to / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def _write_gguf(weights: Path, to: Path, config: PPOConfig | FinetuningConfig, form: str, name: str) -> None:
    check_architecture(load_config(config.model_name, config.trust_remote_code).model_type)
    if is_adapter(weights):
        advice = (
            f"{form}; merge with --gguf f16"
            if form != "f16"
            else f"{form}; merge with --merge --dtype float32"
        )
        network = _merged(weights, config, lambda weight: as_stored(weight, form), advice)
    else:
        network = load_network(replace(config, dtype="float32"), str(weights), pick_device("cpu"))
    write_gguf(network, load_tokenizer(config.model_name, config.trust_remote_code), to, form, name)


def _merged(
    weights: Path, config: PPOConfig | FinetuningConfig, stored: Callable[[Tensor], Tensor], advice: str
) -> PreTrainedModel:
    """The base with an adapter merged in, in float32; a warning where `stored` loses much of the update."""
    quantized = config.quantize != "none"  # codes depend on the type that the run loaded
    loaded = config if quantized else replace(config, dtype="float32")
    network = load_network(loaded, config.model_name, pick_device("cpu"))
    if quantized:
        dequantize_layers(network, torch.float32)
        network.float()
        warnings.warn(NOT_THE_ORIGINAL, stacklevel=2)
    backbone = Backbone(network)
    adapter = load_adapter(backbone, "policy", str(weights))
    assert backbone.peft is not None
    if (share := surviving_share(backbone.peft, adapter, stored)) < ENOUGH:
        warnings.warn(
            f"only {share:.0%} of what was trained is left once the merged weights are rounded to {advice}, "
            "or export the adapter, without --merge",
            stacklevel=2,
        )
    with backbone.using(adapter), no_progress_bar():
        return backbone.peft.merge_and_unload()


def surviving_share(peft: PeftModel, adapter: str, stored: Callable[[Tensor], Tensor]) -> float:
    """How much of an adapter's update is left in weights as they are stored: 1 = all, 0 = rounding takes it
    away."""
    kept = total = 0.0
    for layer in peft.modules():
        if isinstance(layer, LoraLayer) and adapter in layer.lora_A:
            weight = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
            base = weight.detach()
            update = layer.get_delta_weight(adapter).detach()
            left = stored(base + update) - stored(base)
            kept += float((left * update).sum())
            total += float(update.pow(2).sum())
    return kept / total if total else 1.0


def _trained_dtype(
    run: Path, config: PPOConfig | FinetuningConfig
) -> Literal["auto", "float32", "bfloat16", "float16"]:
    """`dtype` as the run resolved it: `auto` was bfloat16 on a GPU, which need not be here; what is not
    quantised is merged from float32 in any case."""
    if config.quantize == "none" or config.dtype != "auto":
        return config.dtype
    on_gpu = bool(Run(run).environment.get("gpus")) if config.device == "auto" else config.device[:3] != "cpu"
    return "bfloat16" if on_gpu else "float32"


def _saved_dtype(config: PPOConfig | FinetuningConfig, name: str) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    return load_config(config.model_name, config.trust_remote_code).dtype or torch.float32


def _config(run: Path) -> PPOConfig | FinetuningConfig:
    if (run / "config.yaml").is_file():
        return PPOConfig.from_yaml(run / "config.yaml")
    if (settings := settings_in(run)) is not None:
        return saved_settings(settings)
    raise ValueError(f"{run} is not the folder of a run: it has no config.yaml or finetuning.yaml")


def model_card(run: Path, config: PPOConfig | FinetuningConfig, whole: bool) -> str:
    """Hugging Face front matter, how to load the model, its results, and every setting."""
    base = config.model_name
    front: Record = {
        "library_name": "transformers" if whole else "peft",
        "tags": ["proxima", "rlhf", "ppo"],
    }
    if Path(base).is_absolute():
        base = Path(base).name
    elif not Path(model_path(base)).exists():
        front["base_model"] = base
    load = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("PATH")\ntokenizer = '
        'AutoTokenizer.from_pretrained("PATH")'
    )
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {run.resolve().name}",
        f"Fine-tuned from `{base}` with Proxima "
        f"({'PPO' if isinstance(config, PPOConfig) else 'supervised'}).",
        *_quantized_note(config, whole),
        f"```python\n{load}\n```",
        *_results(run),
        f"## Settings\n\n```yaml\n{yaml.safe_dump(_public(config), sort_keys=False)}```\n",
    ]
    return "\n\n".join(parts)


def _quantized_note(config: PPOConfig | FinetuningConfig, whole: bool) -> list[str]:
    if config.quantize == "none":
        return []
    if whole:
        return [f"{NOT_THE_ORIGINAL[0].upper()}{NOT_THE_ORIGINAL[1:]}."]
    return [
        "The adapter was trained on the base in 4 bits (nf4, double quantisation, as bitsandbytes has it); "
        "on the base in full its outputs differ."
    ]


def _public(config: PPOConfig | FinetuningConfig) -> Record:
    """Settings, without this machine's folders."""
    values = config.to_dict()
    for name in ("run_dir", "device"):
        values.pop(name, None)
    return {name: _without_folders(value) for name, value in values.items()}


def _without_folders(value: object) -> object:
    """The same, with absolute paths cut to their last part."""
    if isinstance(value, dict):
        return {name: _without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _results(run: Path) -> list[str]:
    """Metrics of the first and last step, and the evaluation if there is one."""
    parts = []
    found = Run(run)
    metrics = found.metrics()
    if found.steps:
        steps, first = metrics["step"], first_step_row(metrics)
        rows = [
            f"| {name} | {_number(column[first])} | {_number(column[-1])} |"
            for name in RESULTS
            if (column := metrics.get(name))
        ]
        head = f"| | step {steps[first]:.0f} | step {steps[-1]:.0f} |\n|---|---|---|\n"
        parts.append("## Results\n\n" + head + "\n".join(rows))
    if results := found.evaluation:
        rate = results["win_rate"]
        before, after = (results[side]["avg_reward"] for side in ("reference", "policy"))
        text = f"reward {before:.4g} before, {after:.4g} after"
        if rate["rate"] is not None:
            text += (
                f"; win rate against the reference {rate['rate']:.3f} (95 %: {rate['low']:.3f} to "
                f"{rate['high']:.3f})"
            )
        parts.append(f"On {results['prompts']} held-out prompts (rewards: {results['rewards']}): {text}.")
    return parts


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else ""
