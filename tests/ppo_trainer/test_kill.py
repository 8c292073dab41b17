"""`kill -9` in processes of their own: a few kills here, `make kill` for many."""

import os
import sys

import pytest

from tests.kill_harness import compare, run_kills


@pytest.mark.long
@pytest.mark.timeout(280)
def test_a_run_killed_again_and_again_equals_one_that_never_was(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(sys.path)
    )  # the process that forks the others does not read pytest's own
    said: list[str] = []
    report = run_kills(2, tmp_path, seed=5, epochs=2, quick=True, say=said.append)
    assert report.kills == 2
    assert report.same, said
    metrics = tmp_path / "runs" / "whole" / "metrics.jsonl"  # the comparison can fail
    metrics.write_text(metrics.read_text().replace('"step": 12', '"step": 13'))
    assert not compare(tmp_path / "runs" / "whole", tmp_path / "runs" / "killed-1")
