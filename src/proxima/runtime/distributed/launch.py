"""Who started this process. In: the environment. Out: its number among how many, and by what."""

from __future__ import annotations

import os


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank_and_count() -> tuple[int, int]:
    """Of this process, as whatever started it says; (0, 1) where nothing did."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return (
        (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        if all(map(os.environ.get, needed))
        else (0, 1)
    )
