"""How OpenMP's threads wait for each other. In: the environment. Out: the same, with a short wait, before
torch reads it.

A thread that waits keeps its core, libgomp's for 3 ms, Intel's and LLVM's for 200 ms, and only then sleeps.
On a quiet machine that saves time. Beside other busy processes the thread that is waited for may have no
core, and the one that waits keeps it from having one: a PPO step took 94 times as long. `import proxima`
shortens the wait; torch reads it once, when it is loaded.
"""

from __future__ import annotations

import os
import sys

SHORT_WAIT = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""Turns of a waiting loop (about 10 us) in libgomp, which torch brings on Linux; milliseconds in Intel's
and LLVM's OpenMP."""
CHOSEN_BY_USER = any(name in os.environ for name in (*SHORT_WAIT, "OMP_WAIT_POLICY", "KMP_LIBRARY"))
TORCH_CAME_FIRST = "torch" in sys.modules


def shorten_waits() -> None:
    """Set `SHORT_WAIT` for this process and those it starts, unless the user has chosen."""
    if not CHOSEN_BY_USER:
        os.environ.update(SHORT_WAIT)


def trouble_with_waits(threads: int) -> tuple[str, str]:
    """What is wrong and what to do, where torch had been loaded before `shorten_waits` and uses so many
    threads."""
    if threads == 1 or CHOSEN_BY_USER or not TORCH_CAME_FIRST:
        return "", ""
    settings = " ".join(f"{name}={value}" for name, value in SHORT_WAIT.items())
    return (
        "torch was imported before proxima, so its threads keep their cores while they wait: beside other "
        "busy processes "
        "a step can take a hundred times as long",
        f"import proxima first, or set {settings} before Python starts",
    )
