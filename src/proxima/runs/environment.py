"""The environment of a run: package versions, the git commit of the working directory, hardware."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from proxima.core.json_record import Record
from proxima.runtime.distributed import rank_and_count

PACKAGE = Path(__file__).parents[1]
DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy", "tokenizers", "datasets")
MATTERS = (
    "packages",
    "machine",
    "cpu",
    "threads",
    "gpus",
    "cuda",
    "driver",
    "cudnn",
    "triton",
    "processes",
)  # what the last bits of a number may depend on
DECIDES = (*MATTERS, "processor", "code")
"""What they depend on in full, as a replay compares it."""


def describe_environment() -> Record:
    import torch

    from proxima import __version__

    gpus = ["Apple GPU (MPS)"] if torch.backends.mps.is_available() else []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "proxima": __version__,
        "code": code_checksum(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda if gpus else None,
        "driver": _driver() if gpus else None,
        "cudnn": torch.backends.cudnn.version() if gpus else None,
        "triton": _version("triton") if gpus else None,
        "processes": rank_and_count()[1],
    }


def changed(before: Record, now: Record) -> list[str]:
    """Differences that may change the last bits of a number."""
    return [
        f"{name}: {before.get(name)} -> {now[name]}"
        for name in MATTERS
        if before.get(name, now[name]) != now[name]
    ]


@cache
def code_checksum(package: Path = PACKAGE) -> str:
    """The SHA-256 of a package's source files, by name and content: a version does not say what code ran."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py"), key=lambda each: each.relative_to(package).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _cpu() -> str:
    """The processor and the instructions that torch uses on it."""
    import torch

    name = _cpu_facts().get("model name") or platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _processor() -> str:
    """Which build of processor it is, where the system says so: names may stand for many."""
    found = _cpu_facts()
    known = {name: found[name] for name in ("cpu family", "model", "stepping") if name in found}
    return ", ".join(f"{name} {value}" for name, value in known.items())


def _cpu_facts() -> dict[str, str]:
    """What Linux says of the first processor; nothing elsewhere."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
        pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
        return {name.strip(): value.strip() for name, value in pairs}
    return {}


def _driver() -> str | None:
    """Of NVIDIA, where the system says so."""
    with suppress(OSError):
        found = re.search(r"\s(\d+\.\d[\d.]*)\s", DRIVER.read_text(encoding="utf-8"))
        return found[1] if found else None
    return None


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
