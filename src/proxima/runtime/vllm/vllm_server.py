"""`VllmServer`: client of one vLLM HTTP server. Loads adapters, samples rows of a job and checks the
replies."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from proxima.core.json_record import Record
from proxima.runtime.vllm.rollout_job import (
    InvalidResponse,
    PolicyVersion,
    RolloutJob,
    SampledResponse,
    WeightCheck,
    parse_response,
)

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 64 << 20
MAX_CONCURRENT = 256  # requests to one server at once
CONTROL_TIMEOUT = 60.0  # seconds at most for a request that samples nothing


class ServerError(Exception):
    """A server failed: `final` where a retry cannot help, `is_invalid_reply` where it did reply."""

    def __init__(self, reason: str, final: bool = False, is_invalid_reply: bool = False):
        super().__init__(reason)
        self.final = final
        self.is_invalid_reply = is_invalid_reply


class AdapterNotLoaded(Exception):  # noqa: N818
    """A server does not have the adapter: it was restarted."""


class VllmServer:
    """One URL and its state."""

    def __init__(self, url: str, timeout: float):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self.error: ServerError | None = None
        """Why it cannot be used now."""
        self._ready: set[str] = set()
        self._limit = asyncio.Semaphore(MAX_CONCURRENT)
        self._loading = asyncio.Lock()

    async def prepare(self, client: httpx.AsyncClient, version: PolicyVersion, check: WeightCheck) -> None:
        """Load the adapter and check it, unless that was done before."""
        async with self._loading:
            if version.name in self._ready:
                return
            given = {"lora_name": version.name, "lora_path": str(version.folder)}
            status, text = await self._post(
                client, "/v1/load_lora_adapter", given, min(self.timeout, CONTROL_TIMEOUT)
            )
            if status == 404 and "detail" in text:
                raise ServerError(
                    "it takes no adapters; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
                    "--enable-lora",
                    final=True,
                )
            if status != 200 and not (status == 400 and "already been" in text):
                raise ServerError(
                    f"it did not load {version.folder}: {status} {_reason(text)}", final=400 <= status < 500
                )
            await self._check(client, version, check)
            self._ready.add(version.name)

    async def _check(self, client: httpx.AsyncClient, version: PolicyVersion, check: WeightCheck) -> None:
        given = {
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "top_k": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "seed": 0,
        }
        choice = await self._complete(client, version, {"prompt": check.ids, **given}, self.timeout)
        try:
            places = choice["prompt_logprobs"][1:]
            found = [place[str(token)]["logprob"] for place, token in zip(places, check.ids[1:], strict=True)]
            sampled = choice["logprobs"]["token_logprobs"][0]
            check.check([float(number) for number in found], float(sampled))
        except (KeyError, TypeError, ValueError, IndexError):
            raise invalid_reply("no log-probabilities of a prompt") from None
        except InvalidResponse as error:
            raise ServerError(str(error), final=True) from None

    async def sample(
        self, client: httpx.AsyncClient, job: RolloutJob, row: int, version: PolicyVersion
    ) -> SampledResponse:
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
        async with self._limit:
            choice = await self._complete(client, version, given, self.timeout)
        numbers = choice.get("logprobs")
        try:
            return parse_response(
                choice.get("token_ids"),
                numbers.get("token_logprobs") if isinstance(numbers, dict) else None,
                job,
            )
        except InvalidResponse as error:
            raise invalid_reply(str(error)) from None

    async def unload(self, client: httpx.AsyncClient, version: PolicyVersion) -> None:
        self._ready.discard(version.name)
        if self.error is None:
            await self._post(client, "/v1/unload_lora_adapter", {"lora_name": version.name}, CONTROL_TIMEOUT)

    async def _complete(
        self, client: httpx.AsyncClient, version: PolicyVersion, given: Record, limit: float
    ) -> Record:
        """The one choice of a completion.

        Neutral values are sent too: a server takes what is missing from the model's generation settings.
        """
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
            raise AdapterNotLoaded(version.name)
        if status != 200:
            raise ServerError(f"it answered {status} {_reason(text)}", final=400 <= status < 500)
        try:
            reply = json.loads(text)
            (choice,) = reply["choices"]
            if reply["model"] != version.name or not isinstance(choice, dict):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise invalid_reply("not JSON with one choice by the requested model") from None
        return choice

    async def _post(
        self, client: httpx.AsyncClient, path: str, given: Record, limit: float
    ) -> tuple[int, str]:
        """Status and text. The time limit holds for the whole reply, so that a slow trickle cannot stall a
        run."""
        import httpx

        parts = []
        size = 0
        try:
            async with asyncio.timeout(limit), client.stream("POST", self.url + path, json=given) as reply:
                async for part in reply.aiter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_REPLY_BYTES:
                        raise ServerError(f"its reply is longer than {MAX_REPLY_BYTES} bytes")
        except TimeoutError:
            raise ServerError(f"it did not answer within {limit:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            raise ServerError(f"it cannot be reached ({type(error).__name__})") from None
        return reply.status_code, b"".join(parts).decode("utf-8", "replace")


def invalid_reply(reason: str) -> ServerError:
    return ServerError(f"it sent an invalid reply: {reason}", is_invalid_reply=True)


def _reason(text: str) -> str:
    """The message in a server's error reply, shortened."""
    try:
        reply = json.loads(text)
        text = str(reply.get("error", {}).get("message", text))
    except (ValueError, AttributeError, RecursionError):
        pass
    return repr(text[:300])
