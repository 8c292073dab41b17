"""The guard before every page. In: a request. Out: the app's answer with safe headers, or a refusal in words.

A page on this machine can be reached by every web page that its user has open. So: the Host must be ours (a
foreign name that resolves to us is refused), the token of the printed address is needed once and becomes a
cookie, and a request that changes something must come from our own page.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MAX_BODY = 64 * 1024
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
ENTRY = b"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta http-equiv="refresh" content="0; url=/">
<title>Proxima</title><p><a href="/">Go on to the page</a></p></html>"""


class Guard:
    """Wraps an app. It alone sees the token; the app behind it sees only requests that passed."""

    def __init__(self, port: int, token: str, host: str = "127.0.0.1", max_body: int = MAX_BODY):
        self.token, self.max_body = token, max_body
        self.hosts = {f"{name}:{port}" for name in (*LOOPBACK, host)}
        if port == 80:
            self.hosts |= {*LOOPBACK, host}
        self.cookie = f"proxima_{port}"  # cookies know no ports: two pages on one machine need two names
        self.session = secrets.token_urlsafe(32)

    async def __call__(self, app: App, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                kept = [
                    pair
                    for pair in message.get("headers", [])
                    if pair[0].decode("latin-1").lower() not in HEADERS
                ]
                message = {**message, "headers": kept + own}
            await send(message)

        headers = _Headers(scope)
        if refusal := self.refusal(scope["method"], headers):
            return await _answer(send_safely, 403, refusal)
        if scope["path"] == "/" and (given := parse_qs(scope["query_string"].decode("latin-1")).get("token")):
            return await self._enter(given, send_safely)
        if not _same(headers.cookie(self.cookie), self.session):
            return await _answer(
                send_safely, 403, "open the address that the terminal shows: it carries the key to this page"
            )
        body = await _read_body(headers, receive, self.max_body)
        if body is None:
            return await _answer(send_safely, 413, f"the request is larger than {self.max_body} bytes")
        await app(scope, _replay(body, receive), send_safely)

    def refusal(self, method: str, headers: _Headers) -> str:
        """Why a request must not pass whoever sent it; empty when it may."""
        host = headers.one("host")
        if host not in self.hosts:
            return "this page answers to its own address only"
        if method in ("GET", "HEAD"):
            return ""
        if headers.one("origin") != f"http://{host}":
            return "a change must come from the page itself"
        if headers.one("sec-fetch-site", "same-origin") != "same-origin":
            return "a change must come from the page itself"
        return ""

    async def _enter(self, given: list[str], send: Send) -> None:
        """The token becomes a cookie. The reply is a page that refreshes itself, not a redirect: after a
        click in another site's page the browser would follow a redirect without the strict cookie."""
        if len(given) != 1 or not _same(given[0], self.token):
            return await _answer(
                send, 403, "the token is not that of this page; open the address that the terminal shows"
            )
        cookie = f"{self.cookie}={self.session}; Path=/; HttpOnly; SameSite=Strict"
        await _answer(send, 200, ENTRY, "text/html; charset=utf-8", [(b"set-cookie", cookie.encode())])


class _Headers:
    """A request's headers; one that is given twice counts as wrong."""

    def __init__(self, scope: Message):
        self.pairs = [
            (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]
        ]

    def one(self, name: str, default: str = "") -> str:
        found = [value for key, value in self.pairs if key == name]
        return found[0] if len(found) == 1 else "" if found else default

    def cookie(self, name: str) -> str:
        try:
            found = SimpleCookie("; ".join(value for key, value in self.pairs if key == "cookie")).get(name)
        except CookieError:
            return ""
        return found.value if found else ""


def _same(left: str, right: str) -> bool:
    """Equal, in a time that does not tell how much of it was."""
    return hmac.compare_digest(left.encode("utf-8", "replace"), right.encode())


async def _read_body(headers: _Headers, receive: Receive, limit: int) -> bytes | None:
    """The whole body, or None as soon as it is longer than the limit."""
    length = headers.one("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        return None
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
        if len(body) > limit:
            return None
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay


async def _answer(
    send: Send,
    status: int,
    content: str | bytes,
    kind: str = "text/plain; charset=utf-8",
    more: list[tuple[bytes, bytes]] | None = None,
) -> None:
    body = content.encode() if isinstance(content, str) else content
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()), *(more or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
