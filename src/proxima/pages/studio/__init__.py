"""The studio: a local web app over a folder of runs.

In: the folder, and a feedback database where people label. Out: a guarded app: live charts, samples,
    microscope, comparison.
"""

from proxima.pages.studio.run_library import Library
from proxima.pages.studio.studio_app import make_studio_app

__all__ = ["Library", "make_studio_app"]
