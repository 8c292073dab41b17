"""`ServerPool`: rollouts on vLLM's own HTTP servers, on other GPUs or machines, while training continues.

A row is sent to another server when one dies, stalls or replies with something invalid. A server that comes
back gets the adapter again. A job fails only when no server can be used for `timeout` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from proxima.core.errors import EngineFailure
from proxima.core.retries import RetryPolicy
from proxima.runtime.vllm.rollout_job import PolicyVersion, RolloutJob, SampledResponse, WeightCheck
from proxima.runtime.vllm.vllm_server import AdapterNotLoaded, ServerError, VllmServer

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_INVALID = 3  # invalid replies per server to one row before the job fails
BACKOFF = RetryPolicy(first_wait=0.5, longest_wait=10.0)  # between rounds in which no server could be used


@dataclass
class Outage:
    """The time since no server could be used."""

    started: float
    failures: int = 0


class ServerPool:
    """All servers, on an event loop in a thread of its own."""

    def __init__(self, urls: tuple[str, ...], timeout: float):
        self.timeout = timeout
        self.retries = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="proxima-rollouts", daemon=True).start()
        self.servers = [VllmServer(url, timeout) for url in urls]
        self._checks: dict[str, WeightCheck] = {}

    def load(self, version: PolicyVersion, check: WeightCheck) -> None:
        """Every server that can loads the version; at least one must."""
        self._checks[version.name] = check
        self._submit(self._load(version)).result()

    def sample(self, job: RolloutJob, version: PolicyVersion) -> Future[list[SampledResponse]]:
        return self._submit(self._sample(job, version))

    def unload(self, version: PolicyVersion) -> None:
        self._checks.pop(version.name, None)
        self._submit(self._unload(version)).result()

    def _submit(self, work: Coroutine[object, object, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _client(self) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(timeout=None, limits=httpx.Limits(), trust_env=False)

    async def _load(self, version: PolicyVersion) -> None:
        async with self._client() as client:
            outage = Outage(time.monotonic())
            while True:
                self._clear_errors()
                await asyncio.gather(*(self._prepare(client, server, version) for server in self.servers))
                if any(server.error is None for server in self.servers):
                    return
                await self._back_off(outage)

    async def _prepare(self, client: httpx.AsyncClient, server: VllmServer, version: PolicyVersion) -> bool:
        """Whether the server has the version now."""
        try:
            await server.prepare(client, version, self._checks[version.name])
        except AdapterNotLoaded:
            self._report(server, ServerError("it no longer has an adapter that it had just loaded"))
        except ServerError as error:
            self._report(server, error)
        return server.error is None

    def _report(self, server: VllmServer, error: ServerError) -> None:
        if server.error is None:
            log.warning("rollout server %s: %s", server.url, error)
        server.error = error

    def _clear_errors(self) -> None:
        """Servers that failed may have come back."""
        for server in self.servers:
            server.error = None

    async def _back_off(self, outage: Outage) -> None:
        """Wait before all servers are tried again; raise where that cannot help or took too long already."""
        outage.failures += 1
        seconds = BACKOFF.wait(outage.failures)
        errors = [server.error for server in self.servers if server.error is not None]
        spent = time.monotonic() - outage.started
        if (errors and all(error.final for error in errors)) or spent + seconds > self.timeout:
            each = "; ".join(f"{server.url}: {server.error}" for server in self.servers)
            raise EngineFailure(f"no rollout server could be used for {spent:.0f} s ({each})")
        if spent < BACKOFF.first_wait:
            log.warning("waiting up to %g s for a rollout server", self.timeout)
        await asyncio.sleep(seconds)

    async def _sample(self, job: RolloutJob, version: PolicyVersion) -> list[SampledResponse]:
        async with self._client() as client:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._sample_row(client, job, row, version))
                        for row in range(len(job.rows))
                    ]
            except BaseExceptionGroup as group_failed:  # (from `except*` only a group could be raised)
                failures = group_failed.subgroup(EngineFailure)
                raise (failures.exceptions[0] if failures else group_failed) from None
        return [task.result() for task in tasks]

    async def _sample_row(
        self, client: httpx.AsyncClient, job: RolloutJob, row: int, version: PolicyVersion
    ) -> SampledResponse:
        turn = row
        invalid = 0
        outage: Outage | None = None
        while True:
            usable = [server for server in self.servers if server.error is None]
            if not usable:
                outage = outage or Outage(time.monotonic())
                await self._back_off(outage)
                self._clear_errors()
                continue
            server = usable[turn % len(usable)]
            try:
                if await self._prepare(client, server, version):
                    return await server.sample(client, job, row, version)
            except AdapterNotLoaded:
                pass  # the same server again: it loads the adapter first
            except ServerError as error:
                self._report(server, error)
                turn += 1
                invalid += error.is_invalid_reply
                if invalid > MAX_INVALID * len(self.servers):
                    raise EngineFailure(
                        f"every rollout server replied with something invalid, last {server.url}: {error}"
                    ) from None
            self.retries += 1

    async def _unload(self, version: PolicyVersion) -> None:
        async def unload(client: httpx.AsyncClient, server: VllmServer) -> None:
            try:
                await server.unload(client, version)
            except ServerError as error:
                self._report(server, error)

        async with self._client() as client:
            await asyncio.gather(*(unload(client, server) for server in self.servers))
