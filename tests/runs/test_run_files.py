"""Every run folder is made, and every JSON file in it written, in one way."""

import ast
import json
import math
from pathlib import Path

import pytest

from proxima.runs.run_files import make_run_folder, plain, write_json

SOURCE = Path(__file__).parents[2] / "src" / "proxima"


def test_folders_without_a_name_never_collide(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "now")
    made = [make_run_folder(tmp_path / "runs", "", "sft-") for _ in range(3)]
    assert [path.name for path in made] == ["sft-now", "sft-now-1", "sft-now-2"]
    assert make_run_folder(tmp_path / "runs", "mine") == make_run_folder(tmp_path / "runs", "mine")
    with pytest.raises(ValueError, match="mine already holds a run; choose another run_name"):
        make_run_folder(tmp_path / "runs", "mine", free=lambda path: False)


def test_json_is_strict_and_whole(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_json(path, {"a": math.nan, "b": (1, math.inf), "é": {"c": 0.5}})
    text = path.read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [1, None], "é": {"c": 0.5}}
    assert "é" in text
    monkeypatch.setattr("os.fsync", lambda number: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_json(path, {"new": 1})
    assert path.read_text(encoding="utf-8") == text
    assert plain(math.nan) is None


def test_nothing_else_writes_the_json_files_of_a_run():
    """`something.write_text(json.dumps(...))` in a part that writes into run folders is a second writer."""
    rooms = ("finetuning", "evaluator", "world/demo", "ppo_trainer", "pages")
    files = [path for room in rooms for path in (SOURCE / room).rglob("*.py")]
    calls = [
        (path.name, ast.unparse(node))
        for path in [*files, SOURCE / "cli" / "train_command.py"]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".write_text")
    ]
    assert [(name, call) for name, call in calls if "json.dumps" in call] == []
