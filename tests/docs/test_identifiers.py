"""Names of code on the pages are names that the code has: a page that names a function which was renamed or
removed misleads."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")
CODE = re.compile(r"(?ms)^```.*?^```")
OF_OTHERS = {"docs/peers.md", "docs/migrate.md", "docs/methods.md"}  # they name other projects' code
ELSEWHERE = {"eNeNeN": "a response, in docs/design.md"}
PAGES = sorted(
    name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    if not name.startswith(("docs/reference/", "CHANGELOG")) and name not in OF_OTHERS
)


@pytest.fixture(scope="module")
def known():
    """Every word of the code, and of the blocks on the pages, which define names of their own."""
    listed = subprocess.run(
        ["git", "ls-files", "src", "tests", "examples", "tools", "Makefile", "pyproject.toml", ".github"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    texts = [
        (ROOT / name).read_text(encoding="utf-8")
        for name in listed
        if name.endswith((".py", ".js", ".yaml", ".yml", ".toml", ".css", "Makefile")) and name != __file__
    ]
    texts += [block for page in PAGES for block in CODE.findall((ROOT / page).read_text(encoding="utf-8"))]
    return set(re.findall(r"\w+", " ".join(texts)))


def unknown(text: str, known: set[str]) -> list[str]:
    """Names in code spans that nothing has; single small words may be anything."""
    named = [span for span in NAME.findall(CODE.sub("", text)) if re.search(r"_|[a-z][A-Z]|\.", span)]
    return sorted({span for span in named if not set(re.findall(r"\w+", span)) <= known} - set(ELSEWHERE))


@pytest.mark.parametrize("page", PAGES)
def test_every_name_exists(page, known):
    assert unknown((ROOT / page).read_text(encoding="utf-8"), known) == []


def test_a_name_that_nothing_has_is_found(known):
    text = "`estimate`, `PPOTrainer.ppo_step()`, `add_" + "nothing`, `Backbone.no_" + "such_thing`, `word`"
    assert unknown(text, known) == ["Backbone.no_" + "such_thing", "add_" + "nothing"]
