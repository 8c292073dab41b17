"""Names that a package exports and imports only when they are first used.

A package's `__init__` lists them once, for type checkers and for `lazy_exports`:

    if TYPE_CHECKING:
        from proxima.runs.run_reader import Run

    __all__, __getattr__ = lazy_exports(__name__)

So `from proxima.runs import Run` imports one module and what that needs, not all of `proxima.runs`.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import warnings
from collections.abc import Callable, Mapping

NONE: Mapping[str, str] = {}


def lazy_exports(package: str, former: Mapping[str, str] = NONE) -> tuple[list[str], Callable[[str], object]]:
    """The package's `__all__` and `__getattr__`.

    Args:
        former: deprecated names, and the exported names that replace them.
    """
    homes = exported_names(pkgutil.get_data(package, "__init__.py") or b"")

    def getattr_(name: str) -> object:
        if name in former:
            warnings.warn(f"{name} is now {former[name]}", DeprecationWarning, stacklevel=2)
            name = former[name]
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return sorted(homes), getattr_


def exported_names(source: bytes) -> dict[str, str]:
    """Each name that the `if TYPE_CHECKING:` block of an `__init__` imports, and the module it is from."""
    blocks = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    return {
        alias.name: str(node.module)
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
