"""The type of a JSON object: values by name, as files and pages hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = dict[str, Any]
RecordView = Mapping[str, Any]
"""One that is only read."""


def within(saved: object, name: str) -> Record:
    """The object under a name in what a file held; empty if there is none, or something else."""
    found = saved.get(name) if isinstance(saved, dict) else None
    return found if isinstance(found, dict) else {}
