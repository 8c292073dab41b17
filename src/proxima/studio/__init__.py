"""The studio: a local web app over a folder of runs.

In: the folder, and a feedback database where people label. Out: a guarded app: live charts, samples, microscope, comparison.
"""

from proxima.studio.app import make_studio_app
from proxima.studio.library import Library

__all__ = ["Library", "make_studio_app"]
