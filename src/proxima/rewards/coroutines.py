"""Coroutines from ordinary code.

In: an awaitable. Out: its result, also where the caller runs inside an event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from functools import cache
from typing import Any


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop in a thread of its own for the whole process: a user's client may keep its connections
    between calls."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="proxima-rewards", daemon=True).start()
    return loop


def run_async(awaitable: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        try:
            return await awaitable
        except (
            SystemExit,
            KeyboardInterrupt,
        ) as error:  # in a task these end the loop, and nobody hears of it
            raise RuntimeError(f"it ended by {type(error).__name__}") from None

    future = asyncio.run_coroutine_threadsafe(wait(), _loop())
    try:
        return future.result()
    except BaseException:  # Ctrl-C here must not leave it running there
        future.cancel()
        raise
