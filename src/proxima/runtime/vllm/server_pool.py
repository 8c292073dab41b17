"""`Servers`: vLLM's own HTTP servers, on other GPUs or machines. In: jobs. Out: answers, while training goes
on.

A row goes to another server when one dies, stalls or answers wrongly; a server that comes back gets the
adapter again. Only when none is left for `timeout` seconds does a job fail.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from proxima.core.errors import EngineFailure
from proxima.runtime.vllm.rollout_job import Answer, Job, Probe, Version
from proxima.runtime.vllm.vllm_server import Forgotten, Server, Trouble

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

Result = TypeVar("Result")

WRONG = 3  # wrong answers a server to one row before the job fails
WAITS = (0.5, 10.0)  # seconds before servers that failed are asked again: the first time, and at most


class Servers:
    """All of them, in a thread of their own."""

    def __init__(self, urls: tuple[str, ...], timeout: float):
        self.timeout, self.retries = timeout, 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="proxima-rollouts", daemon=True).start()
        self.servers = [Server(url, timeout) for url in urls]
        self._probes: dict[str, Probe] = {}

    def use(self, version: Version, probe: Probe) -> None:
        """Every server that can take the version over does; at least one."""
        self._probes[version.name] = probe
        self._soon(self._use(version)).result()

    def sample(self, job: Job, version: Version) -> Future[list[Answer]]:
        return self._soon(self._sample(job, version))

    def drop(self, version: Version) -> None:
        self._probes.pop(version.name, None)
        self._soon(self._drop(version)).result()

    def _soon(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _client(self) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(timeout=None, limits=httpx.Limits(), trust_env=False)

    async def _use(self, version: Version) -> None:
        async with self._client() as client:
            started, wait = time.monotonic(), WAITS[0]
            while True:
                for server in self.servers:
                    server.trouble = None  # it may have come back
                await asyncio.gather(*(self._prepared(client, server, version) for server in self.servers))
                if any(server.trouble is None for server in self.servers):
                    return
                await self._wait(started, wait)
                wait = min(2 * wait, WAITS[1])

    async def _prepared(self, client: httpx.AsyncClient, server: Server, version: Version) -> bool:
        try:
            await server.prepare(client, version, self._probes[version.name])
        except Forgotten:
            self._failed(server, Trouble("it forgot an adapter that it had just loaded"))
        except Trouble as trouble:
            self._failed(server, trouble)
        return server.trouble is None

    def _failed(self, server: Server, trouble: Trouble) -> None:
        if server.trouble is None:
            log.warning("rollout server %s: %s", server.url, trouble)
        server.trouble = trouble

    async def _wait(self, started: float, seconds: float) -> None:
        """Before all are asked again; or the end, where that cannot help or has gone on for too long."""
        troubles = [server.trouble for server in self.servers if server.trouble is not None]
        spent = time.monotonic() - started
        if (troubles and all(trouble.final for trouble in troubles)) or spent + seconds > self.timeout:
            each = "; ".join(f"{server.url}: {server.trouble}" for server in self.servers)
            raise EngineFailure(f"no rollout server could be used for {spent:.0f} s ({each})")
        if spent < WAITS[0]:
            log.warning("waiting up to %g s for a rollout server", self.timeout)
        await asyncio.sleep(seconds)

    async def _sample(self, job: Job, version: Version) -> list[Answer]:
        async with self._client() as client:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._row(client, job, row, version))
                        for row in range(len(job.rows))
                    ]
            except BaseExceptionGroup as group_failed:  # (from `except*` only a group could be raised)
                failures = group_failed.subgroup(EngineFailure)
                raise (failures.exceptions[0] if failures else group_failed) from None
        return [task.result() for task in tasks]

    async def _row(self, client: httpx.AsyncClient, job: Job, row: int, version: Version) -> Answer:
        turn, wrong, started, wait = row, 0, None, WAITS[0]
        while True:
            good = [server for server in self.servers if server.trouble is None]
            if not good:
                started = started or time.monotonic()
                await self._wait(started, wait)
                wait = min(2 * wait, WAITS[1])
                for server in self.servers:
                    server.trouble = None
                continue
            server = good[turn % len(good)]
            try:
                if await self._prepared(client, server, version):
                    return await server.ask(client, job, row, version)
            except Forgotten:
                pass  # the same server again: the adapter first
            except Trouble as trouble:
                self._failed(server, trouble)
                turn, wrong = turn + 1, wrong + trouble.wrong
                if wrong > WRONG * len(self.servers):
                    raise EngineFailure(
                        f"every rollout server answered wrongly, last {server.url}: {trouble}"
                    ) from None
            self.retries += 1

    async def _drop(self, version: Version) -> None:
        async def unload(client: httpx.AsyncClient, server: Server) -> None:
            try:
                await server.unload(client, version)
            except Trouble as trouble:
                self._failed(server, trouble)

        async with self._client() as client:
            await asyncio.gather(*(unload(client, server) for server in self.servers))
