"""The type of a JSON object: values by name, as files and pages hold them."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
