"""What a newcomer's first command does: `uv sync` in an empty copy of this tree, then the command line that
it gives.

It needs the package index; `make test-install` runs it. torch comes from wherever pip is told to look for
files, so that a machine with a CPU build at hand downloads no gigabytes.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.install, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMED = [item.rpartition(" ")[2] for item in PROJECT["project"]["classifiers"] if "Python :: 3." in item]
OF_CUDA = ("nvidia-", "cuda-", "triton")  # what comes with torch where no CPU build is at hand
ONE_STEP = """--config my-data/ppo.yaml --data my-data/prompts.jsonl --rewards length_band,low=5,high=20 --run-name first
    --limit 4 --batch-size 4 --minibatch-size 4 --max-new-tokens 8 --device cpu"""
OF_PIP = {"find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX"}


def call(*words, **settings):
    done = subprocess.run(
        [str(word) for word in words], check=False, capture_output=True, text=True, **settings
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def uv(tmp_path_factory):
    """uv, fresh from the index and told what pip is told, in this Python."""
    home = tmp_path_factory.mktemp("uv")
    call(sys.executable, "-m", "venv", home)
    call(home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv")
    own = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    own |= {"UV_PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    for option, name in OF_PIP.items():
        found = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", f"global.{option}"],
            check=False,
            capture_output=True,
            text=True,
        )
        value = os.environ.get(f"PIP_{option.upper().replace('-', '_')}") or found.stdout
        if value.split():
            own.setdefault(name, ",".join(value.split()))

    def run(*words, cwd):
        return call(home / "bin" / "uv", *words, cwd=cwd, env=own)

    return run


@pytest.fixture
def tree(tmp_path):
    """What git would clone of this folder, as it is now."""
    names = call("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    return tmp_path / "tree"


def test_uv_sync_gives_a_command_line_that_trains(uv, tree, tmp_path):
    uv("sync", cwd=tree)
    pins = {pin.lower().replace("_", "-") for pin in PROJECT["tool"]["uv"]["constraint-dependencies"]}
    lines = uv("pip", "freeze", "--python", ".venv", cwd=tree).lower().splitlines()
    installed = {line.partition("+")[0] for line in lines if "==" in line and not line.startswith(OF_CUDA)}
    assert {"torch==2.13.0"} <= installed <= pins

    def proxima(*words):
        return call(
            tree / ".venv" / "bin" / "proxima", *words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}
        )

    assert "proxima COMMAND" in proxima("--help")
    proxima("data", "sample", "my-data")
    proxima("train", *ONE_STEP.split())
    steps = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(step)["step"] for step in steps] == [1]


@pytest.mark.parametrize("python", [*NAMED, "3.14"])
def test_the_pins_have_wheels_for_every_python_that_is_named_and_the_next(uv, tree, python):
    wheels = [
        "--only-binary",
        ":all:",
        "--python-platform",
        "x86_64-manylinux_2_28",
        "--python-version",
        python,
    ]
    found = uv("pip", "compile", "--quiet", "pyproject.toml", "--extra", "dev", *wheels, cwd=tree)
    assert "torch==2.13.0" in found


def test_vllm_can_be_added_to_the_pinned_packages(uv, tree):
    found = uv("pip", "compile", "--quiet", "pyproject.toml", "--extra", "vllm", cwd=tree)
    assert "\nvllm==" in found
    assert "torch==2.13.0" in found
