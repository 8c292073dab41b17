"""What held-out prompts say of a policy, by someone other than the reward that it is trained on.

In: the metrics of an evaluation. Out: one number, higher is better.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

REWARD = "reward"
JUDGES = "win_rate/"  # and a judge's name


def judges_in(names: Collection[str], before: str = "") -> list[str]:
    """The win rates by judges among metrics; the one by the run's own rewards is none.

    Args:
        before: what stands before the names of an evaluation, for example `validation/`.
    """
    return [name for name in names if name.startswith(before + JUDGES)]


def held_out_evidence(measured: Mapping[str, float]) -> float:
    """The mean win rate against the reference by judges if there are any, else the reward; nan where one
    could not be had.

    Args:
        measured: by name, without `validation/`.
    """
    names = judges_in(measured) or [REWARD]
    return math.fsum(measured.get(name, math.nan) for name in names) / len(names)
