"""The base of every page of the project: who may ask, how it is served, how it looks.

In: routes and static files of a part (`label`). Out: a guarded FastAPI app on this machine alone, until
    Ctrl-C.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.pages.web.access_guard import Guard
    from proxima.pages.web.connections import bounded_server
    from proxima.pages.web.guarded_app import Conflict, Missing, make_app
    from proxima.pages.web.page_server import Site, running, serve
    from proxima.pages.web.single_file import LOOK, PARTS, make_page, read_script, read_style

__all__, __getattr__ = lazy_exports(__name__)
