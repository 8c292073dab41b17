"""The base of every page of the project: who may ask, how it is served, how it looks.

In: routes and static files of a part (`label`). Out: a guarded FastAPI app on this machine alone, until
    Ctrl-C.
"""

from proxima.pages.web.access_guard import Guard
from proxima.pages.web.guarded_app import Conflict, Missing, make_app
from proxima.pages.web.page_server import Site, running, serve

__all__ = ["Conflict", "Guard", "Missing", "Site", "make_app", "running", "serve"]
