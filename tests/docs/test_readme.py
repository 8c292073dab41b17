"""The README is true: its Python prints what it says, and its tree is the one on disk (`tests/docs` has
its commands)."""

import re
from pathlib import Path

from tools.reference.layout import layout, with_layout

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]


def test_the_quickstart_runs_as_printed_and_is_short(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len([line for line in QUICKSTART.splitlines() if line]) <= 10
    space: dict = {}
    exec(QUICKSTART, space)
    assert re.search(r"^\[('|\").+\] \[.+\] -?\d\S+ \d\S+\n$", capsys.readouterr().out)
    assert len(space["results"]["generated_texts"]) == len(space["results"]["rewards"]) == 4
    assert space["results"]["reward_source"] == "brevity"
    assert space["config"].batch_size == 32


def test_the_table_beside_others_is_that_of_its_page():
    page = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8").split("## In short")[1]
    assert re.findall(r"^\|.*\|$", page, re.MULTILINE) == re.findall(
        r"^\|.*\|$", README.split("## Compared with other projects")[1], re.MULTILINE
    )


def test_the_list_of_files_is_what_their_docstrings_say():
    assert with_layout(README) == README, "run `make reference`"


def test_the_list_has_every_file_and_a_line_that_says_something(tmp_path):
    lines = layout().splitlines()[1:-1]
    sources = [path for path in (ROOT / "src" / "proxima").rglob("*.py") if path.name != "__main__.py"]
    assert len(lines) == len(sources)
    assert [line for line in lines if len(line.split(maxsplit=1)[-1]) < 15] == []
    (tmp_path / "__init__.py").write_text('"""A package. Of files."""')
    (tmp_path / "one.py").write_text(f'"""What it does (Author et al. 2020). {"More " * 50}."""')
    (tmp_path / "two.py").write_text(f'"""What it does. In: a file. Out: {"more " * 50}."""')
    assert [line.split(maxsplit=1) for line in layout(tmp_path).splitlines()[1:-1]] == [
        [f"{tmp_path.name}/", "A package. Of files"],
        ["one.py", "What it does (Author et al. 2020)"],
        ["two.py", "What it does"],
    ]


def test_the_tests_have_the_rooms_of_the_package():
    rooms = {path.name for path in (ROOT / "src" / "proxima").iterdir() if any(path.glob("*.py"))}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("*.py"))}
    suites = {"docs", "families", "gpu", "engines", "install", "peer"}
    assert folders - suites == rooms
