"""Code that a run folder asks for (reward modules, `trust_remote_code`) is refused unless the command line
allows it. In: its settings. Out: nothing, or an error that names the flags.

They may name a Python function to import, run what the model writes (`code`), or name a server that is sent
texts and a token: only the command line, or an argument in Python, may ask for these. The same holds for
`trust_remote_code`, which is never taken from a file.
"""

from __future__ import annotations

import shlex
from collections.abc import Container
from pathlib import Path

from proxima.config.ppo_config import PPOConfig


def check_trust(source: str | Path, config: PPOConfig, given: Container[str]) -> None:
    """
    Args:
        source: where the settings stand, for the message.
        given: names of the settings that are replaced by others.
    """
    if flags := trusted_flags(config, given):
        raise ValueError(
            f"{source} names a function or a server, or runs what the model writes; this is done only where "
            f"the command line says so too: if you trust whoever made the run, add {shlex.join(flags)}"
        )


def trusted_flags(config: PPOConfig, given: Container[str] = ()) -> list[str]:
    """What the command line must say to use functions and servers that these settings name."""
    flags: list[str] = []
    for name in ("rewards", "judges", "environment", "tools"):
        specs = getattr(config, name)
        if name not in given and any(spec.runs_code or spec.is_http for spec in specs):
            flags += [f"--{name}", *(spec.to_text() for spec in specs)]
    return flags
