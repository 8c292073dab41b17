"""The same step by TRL 1.12, the last release with PPO, in an environment of its own.

In: a case. Out: its seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from proxima.tools.bench.bench_case import Case
from proxima.tools.bench.random_model import SHAPES

ENVIRONMENT = Path(".venv-trl/bin/python")


def run_peer(case: Case, steps: int = 3) -> dict[str, Any]:
    """Run `trl_step.py` with the interpreter that has TRL: $PROXIMA_TRL_PYTHON, or what `make peer` made."""
    named = os.environ.get("PROXIMA_TRL_PYTHON", "")
    python = named or (str(ENVIRONMENT) if ENVIRONMENT.is_file() else "")
    if not python:
        raise ValueError(
            "TRL needs an environment of its own: `make peer` makes .venv-trl, or set PROXIMA_TRL_PYTHON to "
            "a Python that has "
            "trl==1.12.0"
        )
    if not case.even:
        raise ValueError(
            f"the peer is timed with prompts and responses of one length; case {case.name!r} mixes them"
        )
    given = {
        "shape": SHAPES[case.size],
        "batch": case.batch,
        "prompt": case.prompt[1],
        "response": case.response[1],
    }
    given |= {"epochs": case.epochs, "steps": steps, "micro": min(case.batch, 16), "threads": _threads()}
    script = Path(__file__).parent / "trl_step.py"
    done = subprocess.run(
        [python, str(script), json.dumps(given)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(
            f"TRL failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def _threads() -> int:
    torch = sys.modules["torch"]
    return torch.get_num_threads()
