"""`Server`: one of vLLM's own HTTP servers.

In: an adapter, a row of a job. Out: a checked answer, or `Trouble` in words.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from proxima.runtime.vllm.rollout_job import Answer, Job, Probe, Version, WrongAnswer, read_answer

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 64 << 20
AT_ONCE = 256  # requests under way at one server
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
            status, text = await self._post(
                client, "/v1/load_lora_adapter", given, min(self.timeout, CONTACT_TIME)
            )
            if status == 404 and "detail" in text:
                raise Trouble(
                    "it takes no adapters; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
                    "--enable-lora",
                    final=True,
                )
            if status != 200 and not (status == 400 and "already been" in text):
                raise Trouble(
                    f"it did not load {version.folder}: {status} {_shown(text)}", final=400 <= status < 500
                )
            await self._prove(client, version, probe)
            self._ready.add(version.name)

    async def _prove(self, client: httpx.AsyncClient, version: Version, probe: Probe) -> None:
        given = {
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "top_k": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "seed": 0,
        }
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
                choice.get("token_ids"),
                numbers.get("token_logprobs") if isinstance(numbers, dict) else None,
                job,
            )
        except WrongAnswer as error:
            raise Trouble(f"it answered wrongly: {error}", wrong=True) from None

    async def unload(self, client: httpx.AsyncClient, version: Version) -> None:
        self._ready.discard(version.name)
        if self.trouble is None:
            await self._post(client, "/v1/unload_lora_adapter", {"lora_name": version.name}, CONTACT_TIME)

    async def _complete(
        self, client: httpx.AsyncClient, version: Version, given: dict[str, Any], limit: float
    ) -> dict[str, Any]:
        """The one choice of a completion.

        What is not said here a server would take from the model's own settings.
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
            raise Forgotten(version.name)
        if status != 200:
            raise Trouble(f"it answered {status} {_shown(text)}", final=400 <= status < 500)
        try:
            reply = json.loads(text)
            (choice,) = reply["choices"]
            if reply["model"] != version.name or not isinstance(choice, dict):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise Trouble(
                "it answered wrongly: not JSON with one choice by the model that was asked", wrong=True
            ) from None
        return choice

    async def _post(
        self, client: httpx.AsyncClient, path: str, given: dict[str, Any], limit: float
    ) -> tuple[int, str]:
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


def _shown(text: str) -> str:
    """The reason in a server's error, cut."""
    try:
        reply = json.loads(text)
        text = str(reply.get("error", {}).get("message", text))
    except (ValueError, AttributeError, RecursionError):
        pass
    return repr(text[:300])
