"""The app behind the guard. In: a site and folders of static files. Out: a FastAPI app to add routes to.

`/` is the folder's index.html; `/static/NAME` its other files and those shared by all pages; a further page
has an address and a folder of its own. They are read once, by name, so no path of a request ever reaches the
disk. Errors are JSON, `{"error": "in words"}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.pages.web.access_guard import App, Message, Receive, Send

if TYPE_CHECKING:
    from fastapi import FastAPI

    from proxima.pages.web.page_server import Site

SHARED = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Conflict(ValueError):  # noqa: N818
    """What was asked does not fit what is there: status 409; `state` goes with the answer."""

    def __init__(self, message: str, state: object = None):
        super().__init__(message)
        self.state = state


class Missing(ValueError):  # noqa: N818
    """What was requested does not exist, or no longer does: status 404."""


def make_app(site: Site, folder: Path, **pages: Path) -> FastAPI:
    """An app that answers only requests that the site's guard lets through, however it is run.

    Args:
        pages: folders of further pages by name; the index.html of one is at /NAME.
    """
    from fastapi import FastAPI

    class GuardedApp(FastAPI):
        async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
            behind: App = super().__call__
            await site.guard(behind, scope, receive, send)

    quiet: object = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
    app = GuardedApp(
        docs_url=None, redoc_url=None, openapi_url=None, telemetry=quiet
    )  # which older ones lack
    _add_files(app, folder, pages)
    _add_errors(app)
    return app


def _add_files(app: FastAPI, folder: Path, pages: Mapping[str, Path]) -> None:
    """Pages and static files, read once."""
    from fastapi import HTTPException, Response

    files = {path.name: path for place in (SHARED, *pages.values(), folder) for path in place.iterdir()}
    files |= {f"{name}.html": place / "index.html" for name, place in pages.items()}
    contents = {
        name: (path.read_bytes(), TYPES[path.suffix]) for name, path in files.items() if path.suffix in TYPES
    }

    def send_file(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404, "there is no such file")
        content, kind = contents[name]
        return Response(content, media_type=kind)

    app.get("/")(lambda: send_file("index.html"))
    for page in pages:
        app.get(f"/{page}")(partial(send_file, f"{page}.html"))
    app.get("/static/{name}")(send_file)
    app.get("/favicon.ico")(lambda: send_file("icon.svg"))  # requested by the entry page


def _add_errors(app: FastAPI) -> None:
    """Errors as JSON, in words."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException as AnyHTTPException

    @app.exception_handler(ValueError)
    def refuse(request: object, error: ValueError) -> JSONResponse:
        if isinstance(error, Conflict):
            return JSONResponse({"error": str(error), "state": error.state}, 409)
        return JSONResponse({"error": str(error)}, 404 if isinstance(error, Missing) else 400)

    @app.exception_handler(AnyHTTPException)
    def refuse_request(request: object, error: AnyHTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def refuse_form(request: object, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": "the request has not the form that this page sends"}, 422)
