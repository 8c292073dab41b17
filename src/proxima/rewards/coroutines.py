"""Runs coroutines from synchronous code, also where the caller itself runs inside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from functools import cache
from typing import TypeVar

Result = TypeVar("Result")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for the whole process, in its own thread, so that a user's client can keep connections
    open between calls."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="proxima-rewards", daemon=True).start()
    return loop


def run_async(awaitable: Awaitable[Result]) -> Result:
    """Its result. Blocks the calling thread."""

    async def wait() -> Result:
        try:
            return await awaitable
        except (SystemExit, KeyboardInterrupt) as error:  # in a task these end the loop without a trace
            raise RuntimeError(f"it ended by {type(error).__name__}") from None

    future = asyncio.run_coroutine_threadsafe(wait(), _loop())
    try:
        return future.result()
    except BaseException:  # Ctrl-C here must not leave it running in the loop
        future.cancel()
        raise
