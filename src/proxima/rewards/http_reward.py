"""A reward behind HTTP. In: `Samples`. Out: `Outcome`; a request that fails for good makes nan of its own
samples only.

POST {"prompts": [...], "completions": [...], "ended": [true, ...], "columns": {name: [...]}}
  ->  {"rewards": [number, null or list, ...]}
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import os
import random
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from proxima.config.secrets import hide_address, shareable
from proxima.rewards.coroutines import run_async
from proxima.rewards.reward_outcome import Outcome, read_rewards
from proxima.rewards.reward_samples import Samples

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 16 * 2**20
FIRST_WAIT = 0.5  # seconds before a second attempt, doubled each time
LONGEST_WAIT = 60.0  # whatever the server asks


class Unusable(Exception):  # noqa: N818
    """A reply that is no reply. Its text never holds what the server wrote, nor what was sent."""

    def __init__(self, reason: str, again: bool = False, wait: float = 0.0):
        super().__init__(reason)
        self.again, self.wait = again, wait


class EndpointReward:
    """Sends samples to a URL, a few at a time."""

    attempts = 1  # it has retries of its own

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        retries: int = 3,
        concurrency: int = 4,
        batch: int = 16,
        token_env: str = "",
        allow_insecure: bool = False,
        send_ids: bool = False,
    ):
        """
        Args:
            timeout: seconds for one request, all of it.
            retries: further attempts after connection errors, time-outs, 429 and 5xx.
            concurrency: requests under way at once.
            batch: samples a request.
            token_env: name of the environment variable that holds a bearer token.
            allow_insecure: send the token over plain http to a host that is not this machine.
            send_ids: also send `completion_ids`.
        """
        import httpx

        for name, value, low in (
            ("retries", retries, 0),
            ("concurrency", concurrency, 1),
            ("batch", batch, 1),
        ):
            if value < low:
                raise ValueError(f"option {name} ({value}) of a reward over HTTP must be at least {low}")
        if not 0 < timeout < math.inf:
            raise ValueError(
                f"option timeout ({timeout}) of a reward over HTTP must be a positive number of seconds"
            )
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise ValueError(f"the reward's URL cannot be read: {shareable(str(error))}") from None
        if not parsed.host or parsed.userinfo:
            raise ValueError(
                "the URL of a reward needs a host and no user or password; name a token with token_env "
                "instead"
            )
        self.url, self.timeout, self.retries, self.concurrency, self.batch = (
            url,
            timeout,
            retries,
            concurrency,
            batch,
        )
        self.local, self.send_ids, self._token_env = is_loopback(parsed.host), send_ids, token_env
        if token_env and not (parsed.scheme == "https" or self.local or allow_insecure):
            raise ValueError(
                f"the token in {token_env} would go over plain http to {parsed.host}; use https, or "
                "allow_insecure=true"
            )
        self._headers()  # a missing token is said now
        if (
            token_env
        ):  # at DEBUG it writes down the headers of replies, in which a server may send the token back
            logging.getLogger("httpcore").setLevel(logging.INFO)
        if parsed.query:  # at INFO it writes down the whole address, at DEBUG httpcore does
            logging.getLogger("httpx").setLevel(logging.WARNING)
            logging.getLogger("httpcore").setLevel(logging.INFO)

    def __repr__(self) -> str:
        return f"EndpointReward({hide_address(self.url)!r})"

    def check(self, prompts: Sequence[str]) -> None:
        """It takes any columns, or none."""

    def __call__(self, samples: Samples) -> Outcome:
        return run_async(self._score(samples))

    async def _score(self, samples: Samples) -> Outcome:
        import httpx

        parts = [samples.part(i, i + self.batch) for i in range(0, len(samples), self.batch)]
        gate = asyncio.Semaphore(self.concurrency)
        limits = httpx.Limits()  # none of its own: waiting for one would count as time of the request
        async with httpx.AsyncClient(timeout=self.timeout, limits=limits, trust_env=not self.local) as client:

            async def one(part: Samples) -> Outcome:
                async with gate:
                    return await self._ask(client, part)

            return Outcome.join(await asyncio.gather(*map(one, parts)))

    async def _ask(self, client: httpx.AsyncClient, part: Samples) -> Outcome:
        """One request with its retries; whatever goes wrong for good is a reason, never an exception."""
        import tenacity

        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.retries + 1),
            wait=_waiting,
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, Unusable) and error.again),
            reraise=True,
        )
        try:
            reply: bytes = await retrying(self._post, client, self._body(part))
            return self._read(reply, part)
        except Exception as error:
            reason = (
                str(error) if isinstance(error, Unusable) else f"the request failed ({type(error).__name__})"
            )
            return Outcome.failed(len(part), reason)

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> bytes:
        """The body of a good reply.

        The time limit holds for the whole of it, so that a trickle cannot keep a run waiting.
        """
        import httpx

        try:
            async with asyncio.timeout(self.timeout):
                async with client.stream("POST", self.url, content=body, headers=self._headers()) as reply:
                    check_status(reply.status_code, reply.headers)
                    received = bytearray()
                    async for piece in reply.aiter_raw():
                        received += piece
                        if len(received) > MAX_REPLY_BYTES:
                            raise Unusable(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
                    return bytes(received)
        except (TimeoutError, httpx.TimeoutException):
            raise Unusable(f"no whole reply within {self.timeout:g} s", again=True) from None
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise Unusable(f"the connection failed ({type(error).__name__})", again=True) from None

    def _headers(self) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
        }
        if self._token_env:
            token = os.environ.get(self._token_env, "")
            if not token or not token.isascii() or not token.isprintable() or " " in token:
                raise ValueError(
                    f"the environment variable {self._token_env} (token_env) holds no usable token"
                )
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _body(self, part: Samples) -> bytes:
        columns = {name: [_plain(value) for value in column] for name, column in part.columns().items()}
        body: dict[str, Any] = {"prompts": part.prompts, "completions": part.completions, "columns": columns}
        body["ended"] = part.ended
        if self.send_ids:
            body["completion_ids"] = part.completion_ids
        return json.dumps(body, default=str).encode()

    def _read(self, reply: bytes, part: Samples) -> Outcome:
        return read_reply(reply, part)


def _plain(value: Any) -> Any:
    """A cell of a column as JSON has it: what is not a number there is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_status(status: int, headers: Any) -> None:
    """Only 200 is a reply; 429 and 5xx may be tried again, after as long as the server asks."""
    if status == 200:
        if headers.get("content-encoding", "identity") != "identity":
            raise Unusable("the reply is compressed, which was not asked for")
        return
    again = status == 429 or status >= 500
    hint = " (redirects are not followed)" if 300 <= status < 400 else ""
    raise Unusable(
        f"the server answered {status}{hint}",
        again,
        retry_after(headers.get("retry-after", "")) if again else 0.0,
    )


def retry_after(text: str) -> float:
    """Seconds from a Retry-After header, which holds seconds or a date; 0 where it makes no sense."""
    if text.strip().isdecimal():
        return float(text.strip()[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _waiting(state: Any) -> float:
    """Doubling, with jitter so that many clients do not come back at once; as long as the server asks;
    never past the limit."""
    error = state.outcome.exception()
    backoff = FIRST_WAIT * 2 ** (state.attempt_number - 1) * random.uniform(0.5, 1.0)
    return min(LONGEST_WAIT, max(backoff, getattr(error, "wait", 0.0)))


def read_reply(reply: bytes, part: Samples) -> Outcome:
    try:
        rewards = json.loads(reply)["rewards"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Unusable('the reply is not JSON of the form {"rewards": [...]}') from None
    try:
        return read_rewards(rewards, part.lengths, booleans=False)
    except ValueError as error:
        raise Unusable(str(error)) from None


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
