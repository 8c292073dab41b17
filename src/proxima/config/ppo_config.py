"""`PPOConfig`: every setting of a run, with its meaning, unit and the origin of its default; checked when made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints


@dataclass(frozen=True)
class RewardSpec:
    """One reward. As text: `SOURCE` or `WEIGHT*SOURCE`, for example `0.5*my_rewards:brevity`."""

    source: str | Callable[..., Any]
    """`module:function`; a folder or Hub id of a reward model; in Python also the function itself."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    name: str = ""
    """Name in the metrics; by default the function's or the folder's own."""

    def __post_init__(self) -> None:
        if not (callable(self.source) or (isinstance(self.source, str) and self.source.strip())):
            raise ValueError(f"a reward needs a source: module:function, a folder or a Hub id; got {self.source!r}")
        if not isinstance(self.weight, (int, float)) or not math.isfinite(self.weight):
            raise ValueError(f"the weight of reward {self.label!r} must be a finite number, got {self.weight!r}")

    @property
    def label(self) -> str:
        source = self.source if isinstance(self.source, str) else getattr(self.source, "__name__", "reward")
        return self.name or source.rstrip("/").split("/")[-1].split(":")[-1]

    @property
    def is_function(self) -> bool:
        """True for a Python function or a `module:function` text, False for a model's folder or Hub id."""
        return not isinstance(self.source, str) or (":" in self.source and not Path(self.source).exists())

    @classmethod
    def of(cls, value: Any) -> RewardSpec:
        """From a spec, a text, a mapping with `source`, or a function."""
        if isinstance(value, RewardSpec):
            return value
        if isinstance(value, Mapping):
            unknown = set(value) - {"source", "weight", "name"}
            if unknown or "source" not in value:
                raise ValueError(f"a reward has the keys source, weight and name; got {sorted(value)}")
            return cls(**value)
        if isinstance(value, str) and "*" in value:
            weight, source = value.split("*", 1)
            try:
                return cls(source.strip(), float(weight))
            except ValueError as error:
                raise ValueError(f"reward {value!r} is not SOURCE or WEIGHT*SOURCE: {error}") from None
        return cls(value)

    def to_dict(self) -> dict[str, Any]:
        source = self.source
        if not isinstance(source, str):
            source = f"{getattr(source, '__module__', '?')}:{getattr(source, '__qualname__', repr(source))}"
        return {"source": source, "weight": self.weight, "name": self.label}


@dataclass
class PPOConfig:
    """Settings of a PPO run. Names and defaults down to `top_p` are the user's documents'; the origin of others is given."""

    model_name: str = "Qwen/Qwen3-0.6B-Base"
    """Hugging Face id or local folder of the base causal language model."""
    lora_r: int = 16
    """Rank of the LoRA adapters; 0 trains all weights of separate copies instead."""
    lora_alpha: int = 32
    """LoRA scale: the update is multiplied by lora_alpha / lora_r."""
    lora_dropout: float = 0.1
    """Dropout on adapter inputs in supervised and reward training; PPO itself always runs without dropout."""
    learning_rate: float = 1e-5
    """AdamW learning rate of the policy."""
    value_learning_rate: float = 1e-4
    """AdamW learning rate of the value model."""
    batch_size: int = 32
    """Prompts that `train` draws for one PPO step."""
    max_new_tokens: int = 10
    """Most tokens in a response."""
    gamma: float = 0.99
    """Discount of later rewards, a token."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation: 0 = one-step errors, 1 = whole returns."""
    kl_coef: float = 0.1
    """Weight of the per-token KL penalty in the reward (the first one, where it adapts)."""
    clip_epsilon: float = 0.2
    """PPO-clip: the ratio earns nothing outside 1 - clip_epsilon .. 1 + clip_epsilon."""
    temperature: float = 1.0
    """Sampling temperature; it also divides the logits of every log-probability."""
    top_k: int = 50
    """Sample among the k likeliest tokens; 0 = all."""
    top_p: float = 0.95
    """Of these, among the fewest that hold this share of the probability; 1 = all."""

    # --- models ---
    sft_adapter: str = ""
    """Folder of a LoRA adapter from supervised fine-tuning: the frozen reference, and where policy and value start."""
    lora_targets: str = "all-linear"
    """Modules that get adapters: `all-linear`, or names separated by commas."""
    value_model: str = "adapter"
    """`adapter` = an adapter of its own on the shared base; `policy` = a head on the policy's trunk; else a checkpoint."""
    rewards: tuple[RewardSpec, ...] = ()
    """Rewards to add up: reward-model folders, Hub ids or `module:function`, each with an optional weight."""
    device: str = "auto"
    """`auto` = cuda where there is one, else cpu; or any torch device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the frozen weights; auto = bfloat16 on cuda, float32 on cpu."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint. Off: such checkpoints are refused."""
    seed: int = 0
    """Seed of initial weights, sampling and shuffling."""

    # --- prompts and rewards ---
    truncate_prompts: bool = False
    """Cut prompts that do not fit the context on the left (counted in the metrics) instead of refusing them."""
    missing_eos_penalty: float = 0.0
    """Taken off the score of a response that did not end by itself."""
    normalize_rewards: bool = False
    """Shift and scale the scores of a batch to mean 0 and deviation 1."""
    clip_rewards: float = 0.0
    """Clip scores to +- this; 0 = off."""

    # --- the update ---
    ppo_epochs: int = 4
    """Passes over a rollout (reference value for TL;DR: 4)."""
    minibatch_size: int = 8
    """Sequences in one optimiser step; the last may be short."""
    micro_batch_size: int = 8
    """Sequences in one forward pass. Memory only: results do not depend on it."""
    value_clip: float = 0.0
    """Hold new values this near the old ones in the value loss (reference value 0.2); 0 = off."""
    value_coef: float = 0.1
    """Weight of the value loss where the value is a head on the policy's trunk (reference value 0.1)."""
    value_target: Literal["reward_to_go", "lambda_return"] = "reward_to_go"
    """What the value model learns: discounted reward-to-go, or advantage + value."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a rollout to mean 0 and deviation 1."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the policy loss."""
    dual_clip: float = 0.0
    """Bound c > 1 of dual clipping for negative advantages (Ye et al.: 3); 0 = off."""
    kl_loss_coef: float = 0.0
    """Weight of the exact KL to the reference as a term of the policy loss."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Whether kl_coef stays or is steered towards kl_target."""
    kl_target: float = 6.0
    """Sequence KL in nats that the adaptive controller aims for (Ziegler et al.: 6)."""
    kl_horizon: int = 10_000
    """Sequences over which the adaptive controller acts (Ziegler et al.: 10,000)."""
    kl_stop: float = 0.0
    """End the update of a step once a minibatch's KL(old || new) a token passes this; 0 = off."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm, for each optimiser; 0 = off."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Both learning rates over `train`: constant, or falling to 0. `ppo_step` by itself knows no end and stays constant."""
    warmup_steps: int = 0
    """PPO steps over which both learning rates rise from 0."""
    critic_warmup_steps: int = 0
    """First PPO steps that train the value model alone."""

    # --- the buffer ---
    buffer_sampling: Literal["shuffled", "sequential", "length_balanced", "token_budget"] = "shuffled"
    """How minibatches are drawn: see `proxima.experience_buffer`."""
    buffer_token_budget: int = 4096
    """Most prompt and response tokens in a minibatch when drawn by token budget."""
    buffer_storage: Literal["device", "cpu", "disk"] = "device"
    """Where a rollout waits: where it was made, in CPU memory, or in a memory-mapped file."""
    buffer_max_bytes: int = 8 * 2**30
    """Most memory the buffer may take."""
    buffer_overflow: Literal["error", "drop_oldest", "disk"] = "error"
    """Past that: refuse, forget the oldest sequences, or move to a memory-mapped file."""

    # --- the run ---
    eval_every: int = 1
    """PPO steps between the evaluator's verdicts."""
    patience: int = 0
    """Stop after this many verdicts in a row without improvement; 0 = never."""
    min_improvement: float = 0.0
    """By how much the average reward must beat the best so far to count as improvement."""
    run_dir: str = "runs"
    """Folder of all runs."""
    run_name: str = ""
    """Folder of this run in run_dir; by default the time it started."""
    trackers: tuple[str, ...] = ()
    """Also log to `tensorboard`, `wandb` or `trackio`, where installed."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            setattr(self, field.name, _checked(field.name, getattr(self, field.name), hints[field.name]))
        labels = [spec.label for spec in self.rewards]
        if doubled := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"rewards have the same name: {sorted(doubled)}; give each a name of its own")
        for name in self.trackers:
            if name not in TRACKERS:
                raise ValueError(f"trackers: {name!r} is not one of {', '.join(TRACKERS)}")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip ({self.dual_clip}) must be 0 (off) or above 1")
        if self.run_name and Path(self.run_name).name != self.run_name:
            raise ValueError(f"run_name ({self.run_name!r}) must be a plain folder name; run_dir says where it lies")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as YAML and JSON hold them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**values, "rewards": [spec.to_dict() for spec in self.rewards], "trackers": list(self.trackers)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PPOConfig:
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            from difflib import get_close_matches

            near = get_close_matches(unknown[0], known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown setting {unknown[0]!r}{hint}")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> PPOConfig:
        """Settings from a YAML file; what it leaves out keeps its default."""
        return cls.from_dict(read_yaml(path))

    def to_yaml(self, path: str | Path) -> None:
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file of `setting: value` lines."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the settings in {path}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must hold `setting: value` lines, got {type(values).__name__}")
    return values


TRACKERS = ("tensorboard", "wandb", "trackio")

RANGES: dict[str, tuple[float, float, str]] = {
    # name: lowest, highest, brackets; a round bracket leaves the end out
    "lora_r": (0, 65536, "[]"),
    "lora_alpha": (1, 1_000_000, "[]"),
    "lora_dropout": (0, 1, "[)"),
    "learning_rate": (0, 1, "[]"),
    "value_learning_rate": (0, 1, "[]"),
    "batch_size": (1, math.inf, "[)"),
    "max_new_tokens": (1, math.inf, "[)"),
    "gamma": (0, 1, "[]"),
    "lam": (0, 1, "[]"),
    "kl_coef": (0, math.inf, "[)"),
    "clip_epsilon": (0, 1, "()"),
    "temperature": (0, 100, "(]"),
    "top_k": (0, math.inf, "[)"),
    "top_p": (0, 1, "(]"),
    "seed": (0, 2**32 - 1, "[]"),
    "missing_eos_penalty": (0, math.inf, "[)"),
    "clip_rewards": (0, math.inf, "[)"),
    "ppo_epochs": (1, math.inf, "[)"),
    "minibatch_size": (1, math.inf, "[)"),
    "micro_batch_size": (1, math.inf, "[)"),
    "value_clip": (0, math.inf, "[)"),
    "value_coef": (0, math.inf, "[)"),
    "entropy_coef": (0, math.inf, "[)"),
    "dual_clip": (0, math.inf, "[)"),
    "kl_loss_coef": (0, math.inf, "[)"),
    "kl_target": (0, math.inf, "()"),
    "kl_horizon": (1, math.inf, "[)"),
    "kl_stop": (0, math.inf, "[)"),
    "max_grad_norm": (0, math.inf, "[)"),
    "warmup_steps": (0, math.inf, "[)"),
    "critic_warmup_steps": (0, math.inf, "[)"),
    "buffer_token_budget": (1, math.inf, "[)"),
    "buffer_max_bytes": (1, math.inf, "[)"),
    "eval_every": (1, math.inf, "[)"),
    "patience": (0, math.inf, "[)"),
    "min_improvement": (0, math.inf, "[)"),
}


def _checked(name: str, value: Any, kind: Any) -> Any:
    """The value in its field's type and range, or an error with name, value and range."""
    if name == "rewards":
        items = [value] if isinstance(value, (str, RewardSpec, Mapping)) or callable(value) else value
        if not isinstance(items, (list, tuple)):
            raise ValueError(f"rewards ({value!r}) must be a list of rewards")
        return tuple(RewardSpec.of(item) for item in items)
    if name == "trackers":
        items = (value,) if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise ValueError(f"trackers ({value!r}) must be a list of names")
        return tuple(items)
    if choices := get_args(kind):
        if value not in choices:
            raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(str, choices))}")
        return value
    if kind is float and isinstance(value, str):  # YAML reads 1e-5 as text
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{name} ({value!r}) must be a number") from None
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} ({value!r}) must be of type {kind.__name__}")
    if name in RANGES:
        low, high, brackets = RANGES[name]
        above = value >= low if brackets[0] == "[" else value > low
        below = value <= high if brackets[1] == "]" else value < high
        if not (above and below):  # nan fails too
            raise ValueError(f"{name} ({value}) must be in {brackets[0]}{low}, {high}{brackets[1]}")
    if isinstance(value, str) and name in ("model_name", "lora_targets", "value_model", "run_dir", "device") and not value:
        raise ValueError(f"{name} must not be empty")
    return float(value) if kind is float else value
