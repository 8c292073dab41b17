"""Import paths of earlier versions: they work, with a deprecation warning, until the next release."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "bench": "tools.bench",
    "checkpoint": "runs.checkpoint",
    "comparison": "pages.comparison",
    "demo": "world.demo",
    "doctor": "tools.doctor",
    "engine": "runtime.engine",
    "environment": "runs.environment",
    "errors": "core.errors",
    "evaluation": "evaluator.finished_run",
    "export": "tools.model_export",
    "glossary": "runs.glossary",
    "guards": "runs.guards",
    "label": "pages.label",
    "metrics": "runs.metrics",
    "migrate": "tools.migrate",
    "ops": "core.ops",
    "pairs": "core.pairs",
    "processes": "runtime.distributed",
    "report": "pages.report",
    "rollouts": "runtime.vllm",
    "run_folder": "runs.run_writer",
    "sampling": "core.sampling",
    "scaling": "tools.scaling",
    "stages": "finetuning",
    "studio": "pages.studio",
    "tiny": "world.tiny_models",
    "tracking": "runs.tracking",
    "types": "core.types",
    "web": "pages.web",
}
"""Old name under `proxima` -> new name."""


def new_name(old: str) -> str | None:
    """The current path of a module of an earlier version; None where it did not move."""
    package, _, rest = old.partition(".")
    top, _, inner = rest.partition(".")
    if package != "proxima" or top not in MOVED:
        return None
    return ".".join(filter(None, ("proxima", MOVED[top], inner)))


class MovedLoader(Loader):
    """Loads the module from its new path."""

    def __init__(self, new: str):
        self.new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is now {self.new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self.new)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import machinery has set the old one


class MovedFinder(MetaPathFinder):
    """Finds modules under their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_name(fullname)
        return None if new is None else ModuleSpec(fullname, MovedLoader(new))


def install() -> None:
    """Called once, when `proxima` is imported. It comes before other finders, which may still find a folder
    under the old path."""
    sys.meta_path.insert(0, MovedFinder())
