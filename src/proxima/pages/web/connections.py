"""A server that idle clients cannot block. In: an app. Out: a uvicorn server whose connections are bounded in
number and time.

uvicorn counts every open connection against its limit and waits indefinitely for its first request. Here a
connection that has not sent a whole request in time is closed, and where all places are taken the one that
has waited longest makes room.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 30.0
"""Time for one whole request, head and body, from the connection's start or the last answer."""


class BoundedConnection(H11Protocol):
    """uvicorn's own protocol with a time limit; one that waits for its client can be closed for another's
    sake."""

    _timer: asyncio.TimerHandle | None = None
    _since = 0.0

    @property
    def is_receiving(self) -> bool:
        """A request has begun, but its body is not whole."""
        return self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body

    @property
    def is_waiting(self) -> bool:
        """It is the client's turn: nothing is being answered."""
        return self.cycle is None or self.cycle.response_complete or self.is_receiving

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._make_room()
        self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        """Close idle connections, the longest idle first, then those that still send, until there is a
        free place."""
        others = [
            each for each in self.connections if isinstance(each, BoundedConnection) and each is not self
        ]
        waiting = sorted(
            (each for each in others if each.is_waiting), key=lambda each: (each.is_receiving, each._since)
        )
        excess = len(self.connections) - (self.limit_concurrency or len(self.connections) + 1) + 1
        for each in waiting[: max(excess, 0)]:
            self.connections.discard(each)  # it counts no longer, though it is closed a moment later
            each.transport.abort()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._close_if_waiting)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close_if_waiting(self) -> None:
        if self.is_waiting:
            self.transport.abort()


def bounded_server(app: Any, connections: int, **settings: Any) -> uvicorn.Server:
    """
    Args:
        connections: most connections at once; past it, where none of them is idle, requests are answered 503.
        settings: further ones of `uvicorn.Config`.
    """
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            limit_concurrency=connections,
            **settings,
        )
    )
