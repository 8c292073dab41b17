"""What all settings share: types and ranges checked when made; from and to YAML."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, get_args, get_origin, get_type_hints

from proxima.config.reward_spec import RewardSpec
from proxima.core.regular_files import read_given

LARGEST_FILE = 2**18  # bytes; some numbers of YAML take time that grows with the square of their length


RENAMED = {"max_falling_verdicts": "max_declining_evals"}
"""Settings that had another name in the release before."""


@dataclass
class Settings:
    """Base of every settings dataclass."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as YAML and JSON hold them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in values.items():
            if isinstance(value, tuple):
                values[name] = [item.to_dict() if isinstance(item, RewardSpec) else item for item in value]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = {field.name for field in dataclasses.fields(cls)}
        values = {_new_name(name): value for name, value in values.items()}
        if unknown := sorted(set(values) - known):
            near = get_close_matches(unknown[0], known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown setting {unknown[0]!r}{hint}")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Settings from a YAML file; what it leaves out keeps its default."""
        return cls.from_dict(read_yaml(path))

    def to_yaml(self, path: str | Path) -> None:
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")


def _new_name(name: str) -> str:
    if name in RENAMED:
        warnings.warn(f"the setting {name} is now {RENAMED[name]}", FutureWarning, stacklevel=3)
    return RENAMED.get(name, name)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file of `setting: value` lines.

    Aliases are refused: a few lines of them can stand for more than memory holds.
    """
    import yaml

    class WithoutAliases(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it holds an alias (*name); write the value out")
            return super().compose_node(parent, index)

    try:
        content = read_given(path, LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes: that is no file of settings")
        values = WithoutAliases(content.decode()).get_single_data()
    except RecursionError:
        raise ValueError(f"cannot read the settings in {path}: it is nested too deeply") from None
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        yaml.YAMLError,
    ) as error:  # values of a wrong form raise many kinds
        raise ValueError(f"cannot read the settings in {path}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must hold `setting: value` lines, got {type(values).__name__}")
    return values


def check_fields(settings: Settings) -> None:
    """Every field in its type and range, or an error with name, value and range."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        setattr(settings, field.name, checked(field.name, getattr(settings, field.name), hints[field.name]))


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
    "max_reward_failures": (0, 1, "[]"),
    "ppo_epochs": (1, math.inf, "[)"),
    "minibatch_size": (1, math.inf, "[)"),
    "micro_batch_size": (1, math.inf, "[)"),
    "micro_batch_tokens": (1, math.inf, "[)"),
    "process_timeout": (1, 86400, "[]"),
    "engine_memory": (0, 1, "()"),
    "engine_timeout": (1, 86400, "[]"),
    "importance_clip": (1, math.inf, "[)"),
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
    "epochs": (1, math.inf, "[)"),
    "max_length": (2, math.inf, "[)"),
    "warmup_share": (0, 1, "[]"),
    "weight_decay": (0, math.inf, "[)"),
    "validation_share": (0, 1, "()"),
    "token_samples": (0, math.inf, "[)"),
    "patience": (0, math.inf, "[)"),
    "min_improvement": (0, math.inf, "[)"),
    "checkpoint_every": (0, math.inf, "[)"),
    "keep_checkpoints": (1, math.inf, "[)"),
    "max_skipped_updates": (0, math.inf, "[)"),
    "kl_limit": (0, math.inf, "[)"),
    "min_entropy": (0, math.inf, "[)"),
    "length_limit": (0, math.inf, "[)"),
    "max_declining_evals": (0, math.inf, "[)"),
    "rollback_rate_factor": (0, 1, "(]"),
}


def checked(name: str, value: Any, kind: Any) -> Any:
    """The value in its field's type and range, or an error with name, value and range."""
    if get_origin(kind) is tuple:
        return _checked_list(name, value)
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
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{name} is an integer of more than 64 bits")
    if name in RANGES:
        low, high, brackets = RANGES[name]
        above = value >= low if brackets[0] == "[" else value > low
        below = value <= high if brackets[1] == "]" else value < high
        if not (above and below):  # nan fails too
            raise ValueError(f"{name} ({value}) must be in {brackets[0]}{low}, {high}{brackets[1]}")
    if (
        isinstance(value, str)
        and name in ("model_name", "lora_targets", "value_model", "run_dir", "device")
        and not value
    ):
        raise ValueError(f"{name} must not be empty")
    if name == "run_name" and value and (Path(str(value)).name != value or value[0] == "."):
        raise ValueError(
            f"run_name ({value!r}) must be a plain folder name, no dot before it; run_dir says where it lies"
        )
    return float(value) if kind is float else value


def _checked_list(name: str, value: Any) -> tuple[Any, ...]:
    """One item or a list of them: rewards, or texts."""
    single = isinstance(value, (str, RewardSpec, Mapping)) or callable(value)
    items = [value] if single else value
    if not isinstance(items, (list, tuple)):
        raise ValueError(f"{name} ({value!r}) must be a list")
    if name in ("rewards", "judges"):
        return tuple(RewardSpec.of(item) for item in items)
    if strange := [item for item in items if not isinstance(item, str)]:
        raise ValueError(f"{name} ({strange[0]!r}) must be a text")
    return tuple(items)
