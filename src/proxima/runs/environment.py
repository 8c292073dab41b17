"""The environment of a run: package versions, the git commit of the working directory, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from proxima.core.json_record import Record
from proxima.runtime.distributed import rank_and_count

PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy", "tokenizers", "datasets")
MATTERS = (
    "packages",
    "machine",
    "cpu",
    "threads",
    "gpus",
    "cuda",
    "processes",
)  # what the last bits of a number may depend on


def describe_environment() -> Record:
    import torch

    from proxima import __version__

    gpus = ["Apple GPU (MPS)"] if torch.backends.mps.is_available() else []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "proxima": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda if gpus else None,
        "processes": rank_and_count()[1],
    }


def changed(before: Record, now: Record) -> list[str]:
    """Differences that may change the last bits of a number."""
    return [
        f"{name}: {before.get(name)} -> {now[name]}"
        for name in MATTERS
        if before.get(name, now[name]) != now[name]
    ]


def _cpu() -> str:
    """The processor and the instructions that torch uses on it."""
    import torch

    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
