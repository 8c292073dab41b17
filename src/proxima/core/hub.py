"""Makes Hugging Face libraries use only their caches where the Hub cannot be reached.

Otherwise they would try six times for every file, which takes half a minute and logs two lines each time.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+){0,2}")
"""NAME, OWNER/NAME, and for a dataset OWNER/NAME/CONFIG."""
FRESH = 60  # seconds for which a result is reused


@contextmanager
def hub_or_cache(name: str) -> Iterator[str]:
    """Put this around code that loads `name`.

    Yields why the Hub cannot be reached; empty where it can be or is not needed.
    """
    problem = unreachable() if HUB_ID.fullmatch(name) and not Path(name).exists() else ""
    switches = [
        sys.modules[module]
        for module in ("huggingface_hub.constants", "datasets.config")
        if module in sys.modules
    ]
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches if problem else ():
            switch.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        yield problem
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value  # type: ignore[attr-defined]


def unreachable() -> str:
    """Why the Hub cannot be reached; empty where it can be, or where HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants, is_offline_mode

    return "" if is_offline_mode() else _ask(constants.ENDPOINT, int(time.monotonic() // FRESH))


@lru_cache(maxsize=1)
def _ask(address: str, _minute: int) -> str:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(address, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of the HTTP library, whichever it is
        return f"{address} cannot be reached ({' '.join(str(error).split()) or type(error).__name__})"
    return ""
