"""The README is true: its Python prints what it says, and its tree is the one on disk (`tests/docs` has its commands)."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
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
        r"^\|.*\|$", README.split("## Beside others")[1], re.MULTILINE
    )


def test_the_tree_is_the_one_on_disk():
    block = README.split("## What is where")[1].split("```text")[1].split("```")[0]
    listed = {line.split()[0].rstrip("/") for line in block.splitlines() if line.startswith("  ")}
    package = ROOT / "src" / "proxima"
    present = {
        path.name
        for path in package.iterdir()
        if not path.name.startswith("__") and path.name != "py.typed" and (path.is_dir() or path.suffix == ".py")
    }
    assert listed == present
    for line in block.splitlines():
        if line and not line.startswith("  "):
            assert (ROOT / line.split()[0]).exists()
