"""Checks of single settings that a type and a range cannot express; `setting(..., check=...)` names them.

Each takes a setting's name and its value, and raises a ValueError that says what is wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from proxima.config.reward_spec import RewardSpec

TRACKERS = ("tensorboard", "wandb", "trackio")


def check_folder_name(name: str, value: str) -> None:
    if value and (Path(value).name != value or value[0] == "."):
        raise ValueError(
            f"{name} ({value!r}) must be a plain folder name, no dot before it; run_dir says where it lies"
        )


def check_labels(name: str, specs: Sequence[RewardSpec]) -> None:
    labels = [spec.label for spec in specs]
    if doubled := {label for label in labels if labels.count(label) > 1}:
        raise ValueError(f"{name} have the same name: {sorted(doubled)}; give each a name of its own")


def check_environment(name: str, specs: Sequence[RewardSpec]) -> None:
    if len(specs) > 1:
        raise ValueError(f"{name} is one class, got {len(specs)}: {', '.join(spec.label for spec in specs)}")
    _check_code(name, "Class", specs)


def check_tools(name: str, specs: Sequence[RewardSpec]) -> None:
    check_labels(name, specs)
    _check_code(name, "function", specs)
    if idle := [spec.label for spec in specs if spec.options or spec.weight != 1]:
        raise ValueError(f"{name}: {idle[0]} has a weight or options, which tools do not take")


def _check_code(name: str, kind: str, specs: Sequence[RewardSpec]) -> None:
    for spec in specs:
        if not spec.is_function:
            raise ValueError(f"{name}: {spec.source!r} is not module:{kind}")


def check_trackers(name: str, trackers: Sequence[str]) -> None:
    for tracker in trackers:
        if tracker not in TRACKERS:
            raise ValueError(f"{name}: {tracker!r} is not one of {', '.join(TRACKERS)}")


def check_urls(name: str, urls: Sequence[str]) -> None:
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{name}: {url!r} is not an address of a server, such as http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise ValueError(
                f"{name}: an address with a user or password would be written to the run's folder; leave "
                "them out"
            )


def check_adapters(quantize: str, lora_r: int) -> None:
    """Codes of 4 bits cannot be trained, only adapters beside them."""
    if quantize != "none" and lora_r == 0:
        raise ValueError(
            f"with quantize {quantize} only adapters can be trained, but lora_r is 0; set lora_r above 0, or "
            "quantize to none"
        )
