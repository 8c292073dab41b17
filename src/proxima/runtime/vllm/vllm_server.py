"""`VllmServer`: client of one vLLM HTTP server. Loads adapters, samples rows of a job and checks the
replies."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING

from proxima.core.json_record import Record
from proxima.runtime.vllm.rollout_job import (
    InvalidResponse,
    PolicyVersion,
    RolloutJob,
    SampledResponse,
    WeightCheck,
    is_one_of,
    parse_response,
)

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 64 << 20
MAX_CONCURRENT = 256  # requests to one server at once
CONTROL_TIMEOUT = 60.0  # seconds at most for a request that samples nothing
COMPLETIONS = "/v1/completions"
WITH_MASKS = "/inference/v1/generate"  # the one that returns sampling masks
# sent too: a server takes what is missing from the model's generation settings
NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
    "ignore_eos": True,
}
CHECKED = {"max_tokens": 1, "top_k": 1, "temperature": 1.0, "top_p": 1.0, "seed": 0}

RETURNED = {
    "token_ids": "token ids (`return_token_ids`)",
    "logprobs": "log-probabilities (`logprobs`)",
    "prompt_logprobs": "log-probabilities of a prompt (`prompt_logprobs`)",
}


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
        self._returns_masks: bool | None = None  # None = not asked yet
        self._limit = asyncio.Semaphore(MAX_CONCURRENT)
        self._loading = asyncio.Lock()

    async def prepare(self, client: httpx.AsyncClient, version: PolicyVersion, check: WeightCheck) -> None:
        """Load the adapter and check it, unless that was done before."""
        async with self._loading:
            if version.name in self._ready:
                return
            given = {"lora_name": version.name, "lora_path": str(version.folder)}
            status, text = await self._send(
                client, "POST", "/v1/load_lora_adapter", given, min(self.timeout, CONTROL_TIMEOUT)
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
        given = {"prompt_logprobs": 0, **CHECKED}
        choice = await self._sample(client, COMPLETIONS, version, check.ids, given)
        for name, what in RETURNED.items():
            if choice.get(name) is None:
                raise ServerError(
                    f"vLLM {await self._version(client)} there does not return {what}; start another release "
                    "(docs/engines.md says which ran)",
                    final=True,
                )
        try:
            places = choice["prompt_logprobs"][1:]
            found = [place[str(token)]["logprob"] for place, token in zip(places, check.ids[1:], strict=True)]
            sampled = choice["logprobs"]["token_logprobs"][0]
            check.check([float(number) for number in found], float(sampled))
        except (KeyError, TypeError, ValueError, IndexError):
            raise invalid_reply("no log-probabilities of a prompt") from None
        except InvalidResponse as error:
            raise ServerError(str(error), final=True) from None
        if self._returns_masks is None:
            self._returns_masks = await self._probe_masks(client, version, check.ids)

    async def _probe_masks(self, client: httpx.AsyncClient, version: PolicyVersion, ids: list[int]) -> bool:
        """Whether it returns the ids that a token is sampled from: with top_k 1, the token itself and those
        that tie with it."""
        asked = _request(WITH_MASKS, version, ids, CHECKED)
        status, text = await self._send(client, "POST", WITH_MASKS, asked, self.timeout)
        try:
            choice = _only_choice(text, version) if status == 200 else {}
            (token,), (mask,) = choice["token_ids"], choice["sampling_mask"]
            found = _logprobs(choice)
            sampled = float(found[0]) if isinstance(found, list) else math.nan
            return token in mask and is_one_of(len(mask), sampled)
        except (ServerError, KeyError, TypeError, ValueError, IndexError):
            return False

    async def sample(
        self, client: httpx.AsyncClient, job: RolloutJob, row: int, version: PolicyVersion
    ) -> SampledResponse:
        sampling = job.sampling
        given = {
            "seed": job.seeds[row],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.eos_ids),
        }
        path = WITH_MASKS if self._returns_masks and sampling.top_k else COMPLETIONS
        async with self._limit:
            choice = await self._sample(client, path, version, job.rows[row], given)
        try:
            return parse_response(
                choice.get("token_ids"), _logprobs(choice), job, choice.get("sampling_mask")
            )
        except InvalidResponse as error:
            raise invalid_reply(str(error)) from None

    async def unload(self, client: httpx.AsyncClient, version: PolicyVersion) -> None:
        self._ready.discard(version.name)
        if self.error is None:
            given = {"lora_name": version.name}
            await self._send(client, "POST", "/v1/unload_lora_adapter", given, CONTROL_TIMEOUT)

    async def _sample(
        self,
        client: httpx.AsyncClient,
        path: str,
        version: PolicyVersion,
        prompt: list[int],
        given: Record,
    ) -> Record:
        """The one choice of a reply."""
        asked = _request(path, version, prompt, given)
        status, text = await self._send(client, "POST", path, asked, self.timeout)
        if status == 404 or (status == 403 and path == WITH_MASKS):  # started again, perhaps without masks
            self._ready.discard(version.name)
            self._returns_masks = None
            raise AdapterNotLoaded(version.name)
        if status != 200:
            raise ServerError(f"it answered {status} {_reason(text)}", final=400 <= status < 500)
        return _only_choice(text, version)

    async def _version(self, client: httpx.AsyncClient) -> str:
        try:
            status, text = await self._send(client, "GET", "/version", None, CONTROL_TIMEOUT)
            return str(json.loads(text)["version"])[:40] if status == 200 else "of an unknown version"
        except (ServerError, ValueError, TypeError, KeyError, RecursionError):
            return "of an unknown version"

    async def _send(
        self, client: httpx.AsyncClient, method: str, path: str, given: Record | None, limit: float
    ) -> tuple[int, str]:
        """Status and text. The time limit holds for the whole reply, so that a slow trickle cannot stall a
        run."""
        import httpx

        parts = []
        size = 0
        try:
            async with asyncio.timeout(limit), client.stream(method, self.url + path, json=given) as reply:
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


def _request(path: str, version: PolicyVersion, prompt: list[int], given: Record) -> Record:
    """The body of a request for one sample, in the form of that endpoint."""
    if path == WITH_MASKS:
        sampling = {**NEUTRAL, "logprobs": 0, "detokenize": False, **given}
        return {"model": version.name, "token_ids": prompt, "sampling_params": sampling}
    asked = {"model": version.name, "prompt": prompt, "n": 1, "logprobs": 0, "return_token_ids": True}
    return {**asked, **NEUTRAL, **given}


def _only_choice(text: str, version: PolicyVersion) -> Record:
    try:
        reply = json.loads(text)
        (choice,) = reply["choices"]
        if reply["model"] != version.name or not isinstance(choice, dict):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise invalid_reply("not JSON with one choice by the requested model") from None
    return choice


def _logprobs(choice: Record) -> object:
    """The log-probabilities of the sampled tokens, in either endpoint's form; unchecked."""
    found = choice.get("logprobs")
    if not isinstance(found, dict):
        return None
    places = found.get("content")
    if isinstance(places, list):
        return [place.get("logprob") if isinstance(place, dict) else None for place in places]
    return found.get("token_logprobs")


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
