"""Every setting of TRL 1.12's PPO scripts and its status: `TABLE`, by TRL's name.

Status: `maps` (note: Proxima's name), `differs` (note: what differs), `dropped` (note: why, and what to use
instead). A test compares names and defaults with the real dataclasses: PPOConfig with all it inherits,
ModelConfig, ScriptArguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

Status = Literal["maps", "differs", "dropped"]


@dataclass(frozen=True)
class Old:
    """One setting of TRL."""

    status: Status
    note: str
    default: object = None


MAPS: dict[str, tuple[object, str]] = {
    # name: TRL's default, Proxima's name
    "learning_rate": (3e-6, "learning_rate, value_learning_rate"),
    "response_length": (53, "max_new_tokens"),
    "temperature": (0.7, "temperature"),
    "num_ppo_epochs": (4, "ppo_epochs"),
    "kl_coef": (0.05, "kl_coef"),
    "cliprange": (0.2, "clip_epsilon"),
    "cliprange_value": (0.2, "value_clip"),
    "gamma": (1.0, "gamma"),
    "lam": (0.95, "lam"),
    "missing_eos_penalty": (None, "missing_eos_penalty"),
    "seed": (42, "seed"),
    "per_device_train_batch_size": (8, "batch_size, micro_batch_size"),
    "gradient_accumulation_steps": (1, "batch_size"),
    "total_episodes": (None, "limit, epochs"),
    "num_train_epochs": (3.0, "epochs"),
    "lr_scheduler_type": ("linear", "lr_schedule"),
    "warmup_steps": (0, "warmup_steps"),
    "sft_model_path": ("EleutherAI/pythia-160m", "model_name"),
    "reward_model_path": ("EleutherAI/pythia-160m", "rewards, value_model"),
    "output_dir": (None, "run_dir, run_name"),
    "save_steps": (500, "checkpoint_every"),
    "save_strategy": ("steps", "checkpoint_every"),
    "save_total_limit": (None, "keep_checkpoints"),
    "report_to": ("none", "trackers"),
    "use_cpu": (False, "device"),
    "ddp_timeout": (1800, "process_timeout"),
    "use_peft": (False, "lora_r"),
    "lora_r": (16, "lora_r"),
    "lora_alpha": (32, "lora_alpha"),
    "lora_target_modules": (None, "lora_targets"),
    "use_rslora": (False, "lora_alpha"),
    "dtype": ("float32", "dtype"),
    "load_in_4bit": (False, "quantize"),
    "bnb_4bit_quant_type": ("nf4", "quantize"),
    "use_bnb_nested_quant": (False, "quantize"),
    "dataset_name": (None, "data"),
    "dataset_config": (None, "data"),
    "dataset_train_split": ("train", "data"),
}

DIFFERS: dict[str, tuple[object, str]] = {
    "num_mini_batches": (
        1,
        "it never changed TRL's optimiser steps: one per epoch, which minibatch_size = batch_size gives",
    ),
    "vf_coef": (
        0.1,
        "Adam steps of a separate value model hardly depend on it; for value_model: policy set value_coef",
    ),
    "stop_token": (None, "a response always ends at the model's EOS, as with stop_token='eos'"),
    "stop_token_id": (
        None,
        "a response ends at the EOS ids of the tokenizer and of the model's generation_config.json; add it "
        "there",
    ),
    "max_grad_norm": (
        1.0,
        "TRL's PPO loop never clipped (DeepSpeed may have); max_grad_norm: 0 keeps that, 1 is the safer "
        "choice",
    ),
    "adam_epsilon": (1e-8, "Proxima's AdamW has 1e-5, the reference value of PPO for language models"),
    "bf16": (
        None,
        "TRL's PPO loop computed in the type models were loaded in; dtype: auto is bfloat16 on a GPU, else "
        "float32",
    ),
    "fp16": (
        False,
        "TRL's PPO loop computed in the type models were loaded in; dtype says what is used here",
    ),
    "gradient_checkpointing": (
        True,
        "TRL's PPO loop never turned it on; gradient_checkpointing: true does, and only costs time",
    ),
    "local_rollout_forward_batch_size": (
        64,
        "affects memory only; passes are bounded by micro_batch_size and micro_batch_tokens",
    ),
    "num_sample_generations": (
        10,
        "samples, token by token, are written at each evaluation: eval_every, token_samples",
    ),
    "eval_strategy": (
        "no",
        "TRL's PPO loop never evaluated held-out prompts; --validation FILE does, every eval_every steps",
    ),
    "eval_steps": (None, "use eval_every, with --validation FILE"),
    "fsdp": (None, "use shard_base: true with torchrun"),
    "deepspeed": (None, "use shard_base: true with torchrun, in place of ZeRO-3"),
    "ds3_gather_for_generation": (True, "with shard_base: true, layers are gathered one at a time"),
    "load_best_model_at_end": (
        False,
        "the best step is kept as well as the last if there are --validation prompts",
    ),
    "weight_decay": (0.0, "Proxima's AdamW has none"),
    "adam_beta1": (0.9, "Proxima's AdamW has 0.9"),
    "adam_beta2": (0.999, "Proxima's AdamW has 0.999"),
    "model_name_or_path": (
        None,
        "TRL's scripts took only the tokenizer from it; Proxima takes it from model_name",
    ),
}

DROPPED: dict[str, str] = {
    # names: why, and what to use instead
    "whiten_rewards": "per-token rewards are not whitened; normalize_rewards: true scales the scores, before "
    "the KL penalty",
    "kl_estimator": "only k1 enters the reward (the gradient of k3 there may point away from the "
    "reference); kl_loss: k3 with kl_loss_coef puts it into the loss",
    "batch_size micro_batch_size local_batch_size mini_batch_size local_mini_batch_size world_size "
    "num_total_batches": ("TRL derived it from the other sizes; here it is batch_size and minibatch_size"),
    "model_adapter_name ref_adapter_name": "give the supervised adapter as sft_adapter: it is the "
    "reference, and the start",
    "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision": (
        "nothing is uploaded; `proxima export RUN FOLDER` writes a model that you can upload"
    ),
    "max_steps": "TRL's PPO loop never read it; limit and epochs say how long a run is",
    "lr_scheduler_kwargs": "schedules have no further settings",
    "optim optim_args optim_target_modules": "the optimiser is AdamW",
    "label_smoothing_factor average_tokens_across_devices neftune_noise_alpha "
    "include_num_input_tokens_seen": ("TRL's PPO loop never read it"),
    "bf16_full_eval fp16_full_eval tf32": "dtype is the only setting for precision",
    "gradient_checkpointing_kwargs": "gradient_checkpointing has no further settings",
    "torch_compile torch_compile_backend torch_compile_mode": "compile_layers does this, and is the default",
    "use_liger_kernel liger_kernel_config": "the package has kernels of its own",
    "use_cache torch_empty_cache_steps auto_find_batch_size": "micro_batch_tokens bounds memory; it is "
    "halved when memory runs out",
    "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level "
    "log_level_replica "
    "disable_tqdm": "every step is logged, to runs/NAME/metrics.jsonl",
    "run_name": "a run is named after its folder, from output_dir",
    "project trackio_space_id trackio_bucket_id trackio_static_space_id": "trackers have no further settings",
    "eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches "
    "eval_use_gather_object "
    "eval_accumulation_steps include_for_metrics batch_eval_metrics do_train do_eval do_predict": (
        "held-out prompts are evaluated with --validation FILE"
    ),
    "metric_for_best_model greater_is_better": "the best step is the one with the highest validation reward",
    "save_only_model save_on_each_node enable_jit_checkpoint": "checkpoints are complete: a run resumes "
    "from them bit-exactly",
    "ignore_data_skip restore_callback_states_from_checkpoint resume_from_checkpoint": (
        "TRL's PPO could not resume; `proxima train --resume` can"
    ),
    "full_determinism data_seed": "the same seed gives the same run; seed is the only one",
    "accelerator_config parallelism_config ddp_find_unused_parameters ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_static_graph "
    "ddp_backend fsdp_config local_rank": "torchrun starts the processes, and shard_base is the only setting",
    "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order dataset_num_proc "
    "dataset_streaming "
    "remove_unused_columns label_names train_sampling_strategy length_column_name": (
        "prompts are text, read and tokenised as a step needs them"
    ),
    "debug skip_memory_metrics ignore_bias_buffers": "it is a debugging aid of transformers",
    "model_revision": "download the revision into a folder and give that as model_name",
    "attn_implementation": "attention is the engine's own (engine: plain for transformers')",
    "lora_dropout": "neither TRL's PPO nor Proxima's uses dropout",
    "lora_target_parameters lora_modules_to_save lora_task_type "
    "use_dora": "adapters are plain LoRA on linear layers",
    "load_in_8bit": "there are no 8-bit weights; quantize: nf4 has the base in 4 bits, dtype: bfloat16 in 16",
    "bnb_4bit_quant_storage": "codes are always stored as bytes (uint8)",
    "dataset_test_split": "give held-out prompts as --validation OWNER/NAME:SPLIT",
}

OLDER: dict[str, str] = {
    # of transformers 4, which TRL 1.12 also runs with
    "evaluation_strategy": "held-out prompts are evaluated with --validation FILE",
    "overwrite_output_dir": "a run never overwrites another; choose a new name, or --resume it",
    "logging_dir": "trackers write into the run's folder",
    "save_safetensors": "weights are always safetensors",
    "group_by_length": "prompts are shuffled; passes are packed, so there is no padding to save",
    "no_cuda use_mps_device tpu_num_cores half_precision_backend fp16_opt_level jit_mode_eval use_ipex "
    "past_index ray_scope torchdynamo mp_parameters include_tokens_per_second include_inputs_for_metrics "
    "adafactor push_to_hub_model_id "
    "push_to_hub_organization push_to_hub_token": "it is a setting of transformers 4 that TRL's PPO loop "
    "never read",
}
RATIO = ("warmup_ratio", Old("maps", "warmup_steps", 0.0))
UNSET_DEFAULTS: dict[str, object] = {"kl_estimator": "k1", "whiten_rewards": False}


def _spread(groups: dict[str, str]) -> dict[str, Old]:
    return {
        name: Old("dropped", reason, UNSET_DEFAULTS.get(name))
        for names, reason in groups.items()
        for name in names.split()
    }


TABLE: dict[str, Old] = {
    **{name: Old("maps", new, default) for name, (default, new) in MAPS.items()},
    **{name: Old("differs", note, default) for name, (default, note) in DIFFERS.items()},
    **_spread(DROPPED),
}
"""TRL 1.12 with transformers 5."""

KNOWN: dict[str, Old] = {**TABLE, **_spread(OLDER), RATIO[0]: RATIO[1]}
"""With the names of transformers 4."""

LORA_CONFIG: dict[str, tuple[str, object]] = {
    # PEFT's name: the name in TABLE, PEFT's default
    "r": ("lora_r", 8),
    "lora_alpha": ("lora_alpha", 8),
    "lora_dropout": ("lora_dropout", 0.0),
    "target_modules": ("lora_target_modules", None),
    "target_parameters": ("lora_target_parameters", None),
    "modules_to_save": ("lora_modules_to_save", None),
    "task_type": ("lora_task_type", None),
    "use_rslora": ("use_rslora", False),
    "use_dora": ("use_dora", False),
}

TRAINER_ARGUMENTS = (
    *(
        "args",
        "processing_class",
        "model",
        "ref_model",
        "reward_model",
        "train_dataset",
        "value_model",
        "data_collator",
    ),
    *("eval_dataset", "optimizers", "callbacks", "peft_config"),
)
"""Of TRL's PPOTrainer, in order."""


def near(name: str) -> str:
    """A hint: the known name that an unknown one may be a misspelling of."""
    found = get_close_matches(name, KNOWN, 1, 0.8)
    return f"; did you mean {found[0]}?" if found else ""
