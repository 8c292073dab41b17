"""Times what others take to generate alone: plain `transformers`, or vLLM in an environment of its own.

In: a case and the folder of its weights. Out: its seconds, or what failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from proxima.core.json_record import Record
from proxima.tools.bench.bench_case import Case
from proxima.tools.bench.random_model import SHAPES

VLLM_ENVIRONMENT = Path(".venv-vllm/bin/python")
SCRIPT = Path(__file__).parent / "plain_generation.py"


def run_generation_peer(peer: str, case: Case, folder: Path, steps: int = 3) -> Record:
    """Run `plain_generation.py` with this interpreter, or with the one that has vLLM: $PROXIMA_VLLM_PYTHON,
    or what `make test-engines` made. A peer that does not run here is a row that says why."""
    if peer == "vllm" and not (python := _vllm_python()):
        raise ValueError(
            "vLLM needs an environment of its own: `make .venv-vllm/.installed` makes .venv-vllm, or set "
            "PROXIMA_VLLM_PYTHON to a Python that has vllm"
        )
    if peer == "transformers":
        python = sys.executable
    given = [python, str(SCRIPT), json.dumps(_given(peer, case, folder, steps))]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"peer": peer, "failed": said[-1].strip() if said else f"exit code {done.returncode}"}
    return {"peer": peer, **json.loads(done.stdout.strip().splitlines()[-1])}


def _vllm_python() -> str:
    named = os.environ.get("PROXIMA_VLLM_PYTHON", "")
    return named or (str(VLLM_ENVIRONMENT) if VLLM_ENVIRONMENT.is_file() else "")


def _given(peer: str, case: Case, folder: Path, steps: int) -> Record:
    shape = SHAPES[case.size]
    width = 2 if torch.cuda.is_available() else 4  # bytes per number
    return {
        "peer": peer,
        "folder": str(folder),
        "dtype": "bfloat16" if width == 2 else "float32",
        "responses": case.responses,
        "prompt": case.prompt[1],
        "response": case.response[1],
        "top_k": case.top_k,
        "top_p": case.top_p,
        "vocabulary": shape["vocab_size"],
        "cache_bytes": 2
        * width
        * shape["num_hidden_layers"]
        * shape["num_key_value_heads"]
        * shape["head_dim"],
        "steps": steps,
        "threads": torch.get_num_threads(),
    }


def generation_peer_line(result: Record, peer: Record) -> str:
    """Beside the time that the case's step spends on generation."""
    if "failed" in peer:
        return f"  {peer['peer']} failed: {peer['failed']}"
    ours = result["phases"]["generate"]
    ratio = peer["generate"] / ours
    return (
        f"  {peer['peer']} {peer['version']}: generation alone {peer['generate']:.3f} s, {ratio:.2f} times "
        f"ours (warm-up {peer['warm_up']:.0f} s). It has no adapter, and records neither log-probabilities "
        "nor kept sets."
    )
