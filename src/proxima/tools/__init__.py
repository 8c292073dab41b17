"""Tools around a run: `doctor`, `bench`, `scaling`, `migrate`, `replay`, `export`."""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.tools.model_export import export

__all__, __getattr__ = lazy_exports(__name__)
