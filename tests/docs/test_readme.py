"""The README is true: its Python prints what it says, and its tree is the one on disk (`tests/docs` has
its commands)."""

import re
from pathlib import Path

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


def test_the_tree_is_the_one_on_disk():
    block = README.split("## Repository layout")[1].split("```text")[1].split("```")[0]
    package = ROOT / "src" / "proxima"
    rooms, room, folder = set(), package, package
    for line in block.split("src/proxima/\n")[1].split("examples/")[0].splitlines():
        names = re.match(r"  (?:  )?([^\s,]+(?:, [^\s,]+)*) ", line)  # a continuation line has none
        if names and not line.startswith("    "):
            room = folder = package / names[1]
            rooms.add(room.name)
        elif names:
            assert all((room / name).exists() for name in names[1].split(", ")), line
            folder = room / names[1] if names[1].endswith("/") else room
        assert all((folder / name).exists() for name in re.findall(r"`(\w+\.py)`", line)), line
    assert rooms == {path.name for path in package.iterdir() if any(path.glob("*.py"))}


def test_the_tests_have_the_rooms_of_the_package():
    rooms = {path.name for path in (ROOT / "src" / "proxima").iterdir() if any(path.glob("*.py"))}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("*.py"))}
    suites = {"docs", "families", "gpu", "engines", "install", "peer"}
    assert folders - suites == rooms
