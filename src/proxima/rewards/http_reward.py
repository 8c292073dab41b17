"""A reward behind HTTP. Where a request fails for good, only its own samples get nan.

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
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING

from proxima.config import hide_address, shareable
from proxima.core.retries import RetryPolicy
from proxima.rewards.coroutines import run_async
from proxima.rewards.reward_options import check_limits
from proxima.rewards.reward_outcome import RewardOutcome, read_rewards
from proxima.rewards.reward_samples import Samples

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 16 * 2**20
FIRST_WAIT = 0.5  # seconds before the first retry, doubled each time
LONGEST_WAIT = 60.0  # whatever the server asks for


class UnusableReply(Exception):  # noqa: N818
    """No reply, or one that holds no rewards. The message never quotes what the server wrote or was sent.

    Args:
        is_transient: a retry may help.
        requested_wait: seconds that the server asked to wait.
    """

    def __init__(self, reason: str, is_transient: bool = False, requested_wait: float = 0.0):
        super().__init__(reason)
        self.is_transient = is_transient
        self.requested_wait = requested_wait


class EndpointReward:
    """Sends samples to a URL, a few at a time."""

    attempts = 1  # it retries each request itself
    lacks_unit = False

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
            timeout: seconds for one whole request.
            retries: further attempts after connection errors, time-outs, 429 and 5xx.
            concurrency: requests at once.
            batch: samples per request.
            token_env: name of the environment variable that holds a bearer token.
            allow_insecure: send the token over plain http to a host that is not this machine.
            send_ids: also send `completion_ids`.
        """
        check_limits(
            "a reward over HTTP",
            timeout,
            retries=(retries, 0),
            concurrency=(concurrency, 1),
            batch=(batch, 1),
        )
        parsed = _parse_url(url)
        self.url = url
        self.timeout = timeout
        self.retries = retries
        self.concurrency = concurrency
        self.batch = batch
        self.is_local = is_loopback(parsed.host)
        self.send_ids = send_ids
        self._token_env = token_env
        if token_env and not (parsed.scheme == "https" or self.is_local or allow_insecure):
            raise ValueError(
                f"the token in {token_env} would go over plain http to {parsed.host}; use https, or "
                "allow_insecure=true"
            )
        self._headers()  # reports a missing token now
        _keep_secrets_out_of_logs(bool(token_env), bool(parsed.query))

    def __repr__(self) -> str:
        return f"EndpointReward({hide_address(self.url)!r})"

    def check(self, prompts: Sequence[str], first: int = 0) -> None:
        """It needs no column; all are sent."""

    def __call__(self, samples: Samples) -> RewardOutcome:
        return run_async(self._score(samples))

    async def _score(self, samples: Samples) -> RewardOutcome:
        import httpx

        parts = [samples.part(i, i + self.batch) for i in range(0, len(samples), self.batch)]
        slots = asyncio.Semaphore(self.concurrency)
        limits = httpx.Limits()  # none: waiting for a connection would count as request time
        async with httpx.AsyncClient(
            timeout=self.timeout, limits=limits, trust_env=not self.is_local
        ) as client:

            async def one(part: Samples) -> RewardOutcome:
                async with slots:
                    return await self._request(client, part)

            return RewardOutcome.join(await self._ask_all(parts, one))

    async def _ask_all(
        self, parts: Sequence[Samples], one: Callable[[Samples], Awaitable[RewardOutcome]]
    ) -> list[RewardOutcome]:
        """The outcome of each part."""
        return await asyncio.gather(*map(one, parts))

    async def _request(self, client: httpx.AsyncClient, part: Samples) -> RewardOutcome:
        """One request with its retries. A final failure becomes the outcome's reason, never an exception."""
        policy = RetryPolicy(self.retries + 1, FIRST_WAIT, LONGEST_WAIT, jitter=0.5)
        try:
            post = partial(self._post, client, self._body(part))
            return self._read(await policy.call_async(post, _is_transient), part)
        except Exception as error:
            reason = (
                str(error)
                if isinstance(error, UnusableReply)
                else f"the request failed ({type(error).__name__})"
            )
            return RewardOutcome.failed(len(part), reason)

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> bytes:
        """The body of a good reply.

        The time limit holds for the whole reply, so that a slow trickle cannot stall a run.
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
                            raise UnusableReply(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
                    return bytes(received)
        except (TimeoutError, httpx.TimeoutException):
            raise UnusableReply(f"no whole reply within {self.timeout:g} s", is_transient=True) from None
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise UnusableReply(
                f"the connection failed ({type(error).__name__})", is_transient=True
            ) from None

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
        columns = {name: list(map(_json_cell, column)) for name, column in part.columns().items()}
        body: dict[str, object] = {
            "prompts": part.prompts,
            "completions": part.completions,
            "columns": columns,
            "ended": part.ended,
        }
        if self.send_ids:
            body["completion_ids"] = part.completion_ids
        return json.dumps(body, default=str).encode()

    def _read(self, reply: bytes, part: Samples) -> RewardOutcome:
        return read_reply(reply, part)


def _parse_url(url: str) -> httpx.URL:
    import httpx

    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"the reward's URL cannot be read: {shareable(str(error))}") from None
    if not parsed.host or parsed.userinfo:
        raise ValueError(
            "the URL of a reward needs a host and no user or password; name a token with token_env instead"
        )
    return parsed


def _keep_secrets_out_of_logs(has_token: bool, has_query: bool) -> None:
    """httpx logs the whole address at INFO; httpcore logs it at DEBUG, with the headers of replies, in which
    a server may send the token back."""
    if has_query:
        logging.getLogger("httpx").setLevel(logging.WARNING)
    if has_query or has_token:
        logging.getLogger("httpcore").setLevel(logging.INFO)


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, UnusableReply) and error.is_transient


def _json_cell(value: object) -> object:
    """A column's value as JSON can hold it: nan and infinity become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_status(status: int, headers: Mapping[str, str]) -> None:
    """Only 200 is a reply. 429 and 5xx may be retried, after as long as the server asks."""
    if status == 200:
        if headers.get("content-encoding", "identity") != "identity":
            raise UnusableReply("the reply is compressed, which was not asked for")
        return
    is_transient = status == 429 or status >= 500
    hint = " (redirects are not followed)" if 300 <= status < 400 else ""
    raise UnusableReply(
        f"the server answered {status}{hint}",
        is_transient,
        retry_after(headers.get("retry-after", "")) if is_transient else 0.0,
    )


def retry_after(text: str) -> float:
    """Seconds from a Retry-After header, which holds seconds or a date; 0 where it is neither."""
    if text.strip().isdecimal():
        return float(text.strip()[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def read_reply(reply: bytes, part: Samples) -> RewardOutcome:
    """The rewards in a reply; raises `UnusableReply` if there are none."""
    try:
        rewards = json.loads(reply)["rewards"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UnusableReply('the reply is not JSON of the form {"rewards": [...]}') from None
    try:
        return read_rewards(rewards, part.lengths, booleans=False)
    except ValueError as error:
        raise UnusableReply(str(error)) from None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
