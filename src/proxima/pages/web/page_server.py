"""Serves a page on this machine: port, access token, `--open`.

In: an address. Out: `Site`, its socket open and its token drawn; then the app served until it is stopped.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.pages.web.access_guard import Guard

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

MAX_CONNECTIONS = 256  # browsers keep a few open each


class Site:
    """An open socket, the token that lets in, and the guard before it. Port 0 takes a free one."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"host ({host!r}) is every address of this machine; name the one that browsers will use"
            )
        if not 0 <= port < 65536:
            raise ValueError(f"port ({port}) must be in [0, 65535]; 0 takes a free one")
        try:
            [family, kind, protocol, _, address] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.socket = socket.socket(family, kind, protocol)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(address)
        except OSError as error:
            raise ValueError(
                f"cannot listen at {host}, port {port}: {error.strerror or error}; try --port 0"
            ) from None
        self.port: int = self.socket.getsockname()[1]
        self.token = secrets.token_urlsafe(24)
        name = f"[{host}]" if _is_version_6(host) else host
        self.guard = Guard(self.port, self.token, name)
        self.address = f"http://{name}:{self.port}"

    @property
    def url(self) -> str:
        """What to open: the only thing that carries the token."""
        return f"{self.address}/?token={self.token}"


def serve(app: FastAPI, site: Site, open_browser: bool = False) -> None:
    """Serve in the foreground until Ctrl-C."""
    site.socket.listen()  # whoever reads the address may connect at once
    print(
        f"Open {site.url}\n(the address is a key: whoever has it can use this page; Ctrl-C stops)", flush=True
    )
    with (
        contextlib.suppress(KeyboardInterrupt),
        _opened(site.url) if open_browser else contextlib.nullcontext(),
    ):
        _server(app).run(sockets=[site.socket])


@contextlib.contextmanager
def _opened(url: str) -> Iterator[None]:
    """Show a page in the browser. Every user of a machine can read the words a program is started with, so
    the browser is given a file that nobody else can read, and the file leads on to the address with the
    token. It is removed when the block ends, also by SIGTERM."""
    import webbrowser

    number, name = _private_file()
    try:
        with open(number, "w", encoding="utf-8") as page:
            page.write(
                f'<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
                f'<meta http-equiv="refresh" content="0; url={escape(url)}"><title>Proxima</title>'
            )
        with _exit_on_sigterm():
            webbrowser.open(Path(name).as_uri())
            yield
    finally:
        Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM, which uvicorn raises again after it has stopped, ends the block like any exception."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _private_file() -> tuple[int, str]:
    """A new file of this user alone, open, and its path: in the home folder and not hidden, for a browser in
    a sandbox (a snap) reads nothing else; where that cannot be written, among the temporary files."""
    with contextlib.suppress(OSError, RuntimeError):
        return tempfile.mkstemp(".html", "proxima-", Path.home())
    return tempfile.mkstemp(".html", "proxima-")


@contextlib.contextmanager
def running(app: FastAPI, site: Site) -> Iterator[Site]:
    """Serve in a thread while the block runs."""
    server = _server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [site.socket]}, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        yield site
    finally:
        server.should_exit = True
        thread.join()
        site.socket.close()


def _server(app: FastAPI) -> uvicorn.Server:
    from proxima.pages.web.connections import bounded_server

    return bounded_server(app, MAX_CONNECTIONS, timeout_graceful_shutdown=2)


def _is_version_6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
