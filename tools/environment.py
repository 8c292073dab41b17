"""Makes a virtual environment. In: its folder and arguments of `pip install`. Out: the folder.

uv does in seconds what takes pip a minute. It is fetched for this alone; where it cannot be had, or does not
find what pip would, pip installs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

UV = "uv==0.13.7"
TOLD = {
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
"""Settings of pip, where uv reads the same, and what separates values there."""


def uv_settings(python: str = sys.executable) -> dict[str, str]:
    """This process's environment variables, in which uv is told what the pip of `python` is told."""
    told = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # the newest of all indexes, as pip
    for option, (name, separator) in TOLD.items():
        command = [python, "-m", "pip", "config", "get", f"global.{option}"]
        found = subprocess.run(command, check=False, capture_output=True, text=True).stdout
        value = os.environ.get(f"PIP_{option.upper().replace('-', '_')}") or found
        if value.split():
            told[name] = separator.join(value.split())
    return {**told, **os.environ}


def install(folder: Path, arguments: list[str]) -> None:
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as home:
        uv = [f"{home}/bin/uv", "pip", "install", "--quiet", "--python", python, *arguments]
        if (
            subprocess.run([*pip, "--target", home, UV], check=False).returncode
            or subprocess.run(uv, check=False, env=uv_settings(python)).returncode
        ):
            print("uv could not; pip installs", file=sys.stderr)
            subprocess.run([*pip, *arguments], check=True)


if __name__ == "__main__":
    venv.create(sys.argv[1], with_pip=True)
    install(Path(sys.argv[1]), sys.argv[2:])
