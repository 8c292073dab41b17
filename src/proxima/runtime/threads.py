"""How long OpenMP threads spin while they wait for each other.

A waiting thread keeps its core busy before it sleeps: 3 ms in libgomp, 200 ms in Intel's and LLVM's OpenMP.
On an idle machine that saves time. On a busy one the thread that is waited for may have no core, because
the waiting one keeps it: a PPO step took 94 times as long. `import proxima` shortens the wait through
environment variables, which torch reads once, when it is imported.
"""

from __future__ import annotations

import os
import sys

SHORT_WAIT = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""Iterations of the spin loop (about 10 us) in libgomp, which torch ships on Linux; milliseconds in Intel's
and LLVM's OpenMP."""
CHOSEN_BY_USER = any(name in os.environ for name in (*SHORT_WAIT, "OMP_WAIT_POLICY", "KMP_LIBRARY"))
TORCH_CAME_FIRST = "torch" in sys.modules


def shorten_waits() -> None:
    """Set `SHORT_WAIT` for this process and its children, unless the user has set a value."""
    if not CHOSEN_BY_USER:
        os.environ.update(SHORT_WAIT)


def thread_wait_problem(threads: int) -> tuple[str, str]:
    """The problem and its remedy, where torch was imported before `shorten_waits` and uses several threads;
    else two empty strings."""
    if threads == 1 or CHOSEN_BY_USER or not TORCH_CAME_FIRST:
        return "", ""
    settings = " ".join(f"{name}={value}" for name, value in SHORT_WAIT.items())
    return (
        "torch was imported before proxima, so its threads keep their cores while they wait: beside other "
        "busy processes a step can take a hundred times as long",
        f"import proxima first, or set {settings} before Python starts",
    )
