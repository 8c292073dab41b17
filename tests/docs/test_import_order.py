"""Where a page or an example imports proxima and torch, proxima comes first: how long OpenMP's threads wait is
decided when torch is loaded, also by a library that is built on it."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.blocks import read_blocks
from tests.docs.notebook import code_cells
from tests.docs.pages import PAGES, ROOT

LOAD_TORCH = {"torch", "transformers", "peft", "safetensors", "accelerate", "trl", "sentence_transformers"}
SCRIPT = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n(.*?)\n\1$", re.DOTALL | re.MULTILINE)


def imported(code: str) -> list[str]:
    """The packages that a program imports, in the order of its text."""
    found = []
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        found += [(node.lineno, name.split(".")[0]) for name in names]
    return [name for _, name in sorted(found, key=lambda each: each[0])]


def too_late(code: str) -> str:
    """What loads torch before proxima is imported; empty where proxima is first, or not used at all."""
    names = imported(code)
    before = names[: names.index("proxima")] if "proxima" in names else []
    return next((name for name in before if name in LOAD_TORCH), "")


def programs(page: Path) -> list[str]:
    """The page's blocks of Python, and each script within its shell commands."""
    blocks = read_blocks(page)
    shell = "".join(block.text for block in blocks if block.language == "bash")
    scripts = [text for _, text in SCRIPT.findall(shell) if "import " in text]
    return [*filter(is_python, scripts), *(block.text for block in blocks if block.language == "python")]


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


EXAMPLES = [ROOT / "main.py", *sorted((ROOT / "examples").rglob("*.py"))]
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
PROGRAMS = {
    **{path: programs(path) for path in [*PAGES, *sorted((ROOT / "examples").rglob("*.md"))]},
    **{path: [path.read_text(encoding="utf-8")] for path in EXAMPLES},
    **{path: ["\n".join(code_cells(path))] for path in NOTEBOOKS},
}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_proxima_is_imported_before_what_loads_torch(path):
    assert [found for code in PROGRAMS[path] if (found := too_late(code))] == []


def test_a_wrong_order_is_found():
    assert too_late("import os\nimport torch\nfrom proxima import Run") == "torch"
    assert too_late("def late():\n    from transformers import X\nimport proxima") == "transformers"
    assert not too_late("import proxima\nimport torch")
    assert not too_late("import torch")
    assert sum(len(codes) for codes in PROGRAMS.values()) > 60
    assert any(too_late("import torch\n" + code) for codes in PROGRAMS.values() for code in codes)
