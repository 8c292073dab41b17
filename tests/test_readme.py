"""The README is true: its Python prints what it says, and its tree is the one on disk (`tests/docs` has its commands)."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.filterwarnings("ignore:no reward is configured")
def test_the_quickstart_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    exec(BLOCKS[0], space)  # the quickstart
    shown = capsys.readouterr().out
    assert re.search(
        r"Generated texts: \[.+, .+\]\nRewards: \[.+, .+\]\nValue loss: \d+\.\d{4}\nPolicy loss: -?\d+\.\d{4}", shown
    )
    assert space["config"].batch_size == 32
    assert len(space["results"]["generated_texts"]) == len(space["results"]["rewards"]) == 2
    assert space["results"]["reward_source"] == "untrained"
    exec(BLOCKS[1], space)  # with a reward of one's own
    assert "all epochs done" in capsys.readouterr().out
    assert (space["results"].run_folder / "policy" / "adapter_model.safetensors").is_file()


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
