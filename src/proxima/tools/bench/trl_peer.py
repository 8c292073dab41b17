"""Times the same step with TRL 1.12, the last release with PPO, in an environment of its own.

In: a case. Out: its seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import torch

from proxima.core.json_record import Record
from proxima.tools.bench.bench_case import Case
from proxima.tools.bench.finetuning_case import FinetuningCase
from proxima.tools.bench.random_model import SHAPES

ENVIRONMENT = Path(".venv-trl/bin/python")


def run_peer(case: Case | FinetuningCase, steps: int = 3) -> Record:
    """Run `trl_step.py` with the interpreter that has TRL: $PROXIMA_TRL_PYTHON, or what `make peer` made."""
    named = os.environ.get("PROXIMA_TRL_PYTHON", "")
    python = named or (str(ENVIRONMENT) if ENVIRONMENT.is_file() else "")
    if not python:
        raise ValueError(
            "TRL needs an environment of its own: `make peer` makes .venv-trl, or set PROXIMA_TRL_PYTHON to "
            "a Python that has trl==1.12.0"
        )
    given = {
        **(_of_finetuning(case) if isinstance(case, FinetuningCase) else _of_step(case)),
        "shape": SHAPES[case.size],
        "batch": case.batch,
        "steps": steps,
        "threads": torch.get_num_threads(),
    }
    script = Path(__file__).parent / "trl_step.py"
    done = subprocess.run(
        [python, str(script), json.dumps(given)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(f"TRL failed: {said[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _of_step(case: Case) -> Record:
    if not case.has_peer:
        raise ValueError(
            f"TRL is timed with prompts and responses of one length and weights in full, which case "
            f"{case.name!r} does not have"
        )
    return {
        "job": "grpo" if case.generations > 1 else "ppo",
        "prompt": case.prompt[1],
        "response": case.response[1],
        "epochs": case.epochs,
        "minibatches": case.minibatches,
        "micro": min(case.responses, 16),
        "generations": case.generations,
    }


def _of_finetuning(case: FinetuningCase) -> Record:
    return {"job": case.kind, "prompt": case.prompt, "response": case.response, "micro": case.batch}
