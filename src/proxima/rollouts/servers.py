"""`Servers`: vLLM's own HTTP servers, on other GPUs or machines. In: jobs. Out: answers, while training goes on.

A row goes to another server when one dies, stalls or answers wrongly; a server that comes back gets the adapter again. Only
when none is left for `timeout` seconds does a job fail.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from proxima.errors import EngineFailure
from proxima.rollouts.job import Answer, Job, Probe, Version, WrongAnswer, read_answer

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_REPLY_BYTES = 64 << 20
AT_ONCE = 256  # requests under way at one server
WRONG = 3  # wrong answers a server to one row before the job fails
WAITS = (0.5, 10.0)  # seconds before servers that failed are asked again: the first time, and at most
CONTACT_TIME = 60.0  # seconds at most for a request that samples nothing


class Trouble(Exception):  # noqa: N818
    """A server failed; `final` where asking it again cannot help, `wrong` where it did answer."""

    def __init__(self, reason: str, final: bool = False, wrong: bool = False):
        super().__init__(reason)
        self.final, self.wrong = final, wrong


class Forgotten(Exception):  # noqa: N818
    """A server does not know the adapter: it was started again."""


class Server:
    """One URL, and what is known of it."""

    def __init__(self, url: str, timeout: float):
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout
        self.trouble: Trouble | None = None
        self._ready: set[str] = set()
        self._gate, self._loading = asyncio.Semaphore(AT_ONCE), asyncio.Lock()

    async def prepare(self, client: httpx.AsyncClient, version: Version, probe: Probe) -> None:
        """Load the adapter where it is not there yet, and prove it."""
        async with self._loading:
            if version.name in self._ready:
                return
            given = {"lora_name": version.name, "lora_path": str(version.folder)}
            status, text = await self._post(client, "/v1/load_lora_adapter", given, min(self.timeout, CONTACT_TIME))
            if status == 404 and "detail" in text:
                raise Trouble(
                    "it takes no adapters; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora", final=True
                )
            if status != 200 and not (status == 400 and "already been" in text):
                raise Trouble(f"it did not load {version.folder}: {status} {_shown(text)}", final=400 <= status < 500)
            await self._prove(client, version, probe)
            self._ready.add(version.name)

    async def _prove(self, client: httpx.AsyncClient, version: Version, probe: Probe) -> None:
        given = {"prompt_logprobs": 0, "max_tokens": 1, "top_k": 1, "temperature": 1.0, "top_p": 1.0, "seed": 0}
        choice = await self._complete(client, version, {"prompt": probe.ids, **given}, self.timeout)
        try:
            places = choice["prompt_logprobs"][1:]
            found = [place[str(token)]["logprob"] for place, token in zip(places, probe.ids[1:], strict=True)]
            sampled = choice["logprobs"]["token_logprobs"][0]
            probe.check([float(number) for number in found], float(sampled))
        except (KeyError, TypeError, ValueError, IndexError):
            raise Trouble("it answered wrongly: no log-probabilities of a prompt", wrong=True) from None
        except WrongAnswer as error:
            raise Trouble(str(error), final=True) from None

    async def ask(self, client: httpx.AsyncClient, job: Job, row: int, version: Version) -> Answer:
        sampling = job.sampling
        given = {
            "prompt": job.rows[row],
            "seed": job.seeds[row],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.eos_ids),
        }
        async with self._gate:
            choice = await self._complete(client, version, given, self.timeout)
        numbers = choice.get("logprobs")
        try:
            return read_answer(
                choice.get("token_ids"), numbers.get("token_logprobs") if isinstance(numbers, dict) else None, job
            )
        except WrongAnswer as error:
            raise Trouble(f"it answered wrongly: {error}", wrong=True) from None

    async def forget(self, client: httpx.AsyncClient, version: Version) -> None:
        self._ready.discard(version.name)
        if self.trouble is None:
            await self._post(client, "/v1/unload_lora_adapter", {"lora_name": version.name}, CONTACT_TIME)

    async def _complete(
        self, client: httpx.AsyncClient, version: Version, given: dict[str, Any], limit: float
    ) -> dict[str, Any]:
        """The one choice of a completion. What is not said here a server would take from the model's own settings."""
        neutral = {
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_p": 0.0,
            "ignore_eos": True,
        }
        asked = {"model": version.name, "n": 1, "logprobs": 0, "return_token_ids": True, **neutral, **given}
        status, text = await self._post(client, "/v1/completions", asked, limit)
        if status == 404:
            self._ready.discard(version.name)
            raise Forgotten(version.name)
        if status != 200:
            raise Trouble(f"it answered {status} {_shown(text)}", final=400 <= status < 500)
        try:
            reply = json.loads(text)
            (choice,) = reply["choices"]
            if reply["model"] != version.name or not isinstance(choice, dict):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise Trouble("it answered wrongly: not JSON with one choice by the model that was asked", wrong=True) from None
        return choice

    async def _post(self, client: httpx.AsyncClient, path: str, given: dict[str, Any], limit: float) -> tuple[int, str]:
        """Status and text. The limit is on all of it: a server that trickles must not hold a run."""
        import httpx

        parts, size = [], 0
        try:
            async with asyncio.timeout(limit), client.stream("POST", self.url + path, json=given) as reply:
                async for part in reply.aiter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_REPLY_BYTES:
                        raise Trouble(f"it answered more than {MAX_REPLY_BYTES} bytes")
        except TimeoutError:
            raise Trouble(f"it did not answer within {limit:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            raise Trouble(f"it cannot be reached ({type(error).__name__})") from None
        return reply.status_code, b"".join(parts).decode("utf-8", "replace")


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
                    tasks = [group.create_task(self._row(client, job, row, version)) for row in range(len(job.rows))]
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
                    raise EngineFailure(f"every rollout server answered wrongly, last {server.url}: {trouble}") from None
            self.retries += 1

    async def _drop(self, version: Version) -> None:
        async def forget(client: httpx.AsyncClient, server: Server) -> None:
            try:
                await server.forget(client, version)
            except Trouble as trouble:
                self._failed(server, trouble)

        async with self._client() as client:
            await asyncio.gather(*(forget(client, server) for server in self.servers))


def _shown(text: str) -> str:
    """The reason in a server's error, cut."""
    try:
        reply = json.loads(text)
        text = str(reply.get("error", {}).get("message", text))
    except (ValueError, AttributeError, RecursionError):
        pass
    return repr(text[:300])
