"""Where progress bars are shown: in a terminal and in a notebook, but not in a log file."""

from __future__ import annotations

import sys


def no_bars() -> bool | None:
    """For tqdm's `disable`. A notebook's output is not a terminal, so tqdm by itself would show no bar
    there."""
    return False if in_notebook() else None  # None = unless the output is a terminal


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")
