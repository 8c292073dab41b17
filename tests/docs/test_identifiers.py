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


FLAG = re.compile(r"(?<![\w-])--([a-z][\w-]*)")
FLAGS_ELSEWHERE = {"reward-scale": "a setting that docs/contributing.md adds"}


@pytest.fixture(scope="module")
def code():
    """The text of the code."""
    listed = subprocess.run(
        ["git", "ls-files", "src", "tests", "examples", "tools", "Makefile", "pyproject.toml", ".github"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return [
        (ROOT / name).read_text(encoding="utf-8")
        for name in listed
        if name.endswith((".py", ".js", ".yaml", ".yml", ".toml", ".css", "Makefile")) and name != __file__
    ]


@pytest.fixture(scope="module")
def known(code):
    """Every word of the code, and of the blocks on the pages, which define names of their own."""
    texts = code + [
        block for page in PAGES for block in CODE.findall((ROOT / page).read_text(encoding="utf-8"))
    ]
    return set(re.findall(r"\w+", " ".join(texts)))


def unknown(text: str, known: set[str]) -> list[str]:
    """Names in code spans that nothing has; single small words may be anything."""
    named = [span for span in NAME.findall(CODE.sub("", text)) if re.search(r"_|[a-z][A-Z]|\.", span)]
    return sorted({span for span in named if not set(re.findall(r"\w+", span)) <= known} - set(ELSEWHERE))


@pytest.mark.parametrize("page", PAGES)
def test_every_name_exists(page, known):
    assert unknown((ROOT / page).read_text(encoding="utf-8"), known) == []


@pytest.fixture(scope="module")
def flags(code):
    """Every flag that the code names, and every name that may be one."""
    text = " ".join(code)
    named = {name.replace("_", "-") for name in re.findall(r"\w+", text)}
    return named.union(FLAG.findall(text), FLAGS_ELSEWHERE)


def unknown_flags(text: str, flags: set[str]) -> list[str]:
    named = set(FLAG.findall(text))
    return sorted(flag for flag in named if not {flag, flag.removeprefix("no-")} & flags)


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_exists(page, flags):
    assert unknown_flags((ROOT / page).read_text(encoding="utf-8"), flags) == []


def test_a_flag_that_nothing_has_is_found(flags):
    text = "`--engine-urls`, `--no-" + "skip-checks`, `--engine-" + "url`, a---b"
    assert unknown_flags(text, flags) == ["engine-" + "url"]


def test_a_name_that_nothing_has_is_found(known):
    text = "`estimate`, `PPOTrainer.ppo_step()`, `add_" + "nothing`, `Backbone.no_" + "such_thing`, `word`"
    assert unknown(text, known) == ["Backbone.no_" + "such_thing", "add_" + "nothing"]
