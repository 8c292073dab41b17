"""Pages that are one file. In: names of shared files, markup, data. Out: HTML that loads nothing and runs
only its own script.

A page's policy names the checksum of its script and style, so that no other can run, whatever a text holds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

from proxima.core.terminal_text import without_lone_surrogates
from proxima.pages.web.guarded_app import SHARED

DATA = "data"  # id of the element that holds the page's data
LOOK = ("base.css", "chart.css", "microscope.css")
PARTS = ("dom.js", "chart.js", "turns.js", "microscope.js")


def read_script(*files: str | Path) -> str:
    """Modules one after the other as one: their imports go, their exports become plain names."""
    text = "\n".join(_read(file) for file in files)
    text = re.sub(r"^import\s[^;]*;\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^export\s+", "", text, flags=re.MULTILINE)


def read_style(*files: str | Path) -> str:
    return "\n".join(_read(file) for file in files)


def make_page(title: str, body: str, script: str, style: str, data: Mapping[str, object]) -> str:
    """
    Args:
        body: markup, its texts escaped.
        data: what the script reads from the element `data`; nan becomes null.
    """
    policy = (
        f"default-src 'none'; script-src '{_checksum(script)}'; style-src '{_checksum(style)}'; img-src "
        "data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return without_lone_surrogates(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" '
        f'href="data:,">\n<style>{style}</style>\n</head>\n<body>\n{body}\n'
        f'<script type="application/json" id="{DATA}">{as_json(data)}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def as_json(value: object) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin another."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair, written as JSON does


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(file: str | Path) -> str:
    return (SHARED / file).read_text(encoding="utf-8")


def _checksum(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
