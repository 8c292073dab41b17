"""How this process was launched: its rank and world size, and whether by `torchrun`, from the environment."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank_and_count() -> tuple[int, int]:
    """Rank and world size of this process, as its launcher says; (0, 1) without a launcher."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(map(os.environ.get, needed)):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def end_process() -> NoReturn:
    """Exit with 0, without tearing the interpreter down.

    Objects that still hold a process group (a mesh, sharded layers) keep its threads, and these would now and
    then abort a process that has done its work.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
