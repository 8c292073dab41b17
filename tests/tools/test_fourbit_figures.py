"""tests/gpu/fourbit_figures.py without a GPU: the same code on a tiny model; a part that fails does not end it."""

import json

import pytest
import torch

from tests.gpu import fourbit_figures as figures


def shown(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there the real figures are measured")
def test_every_part_runs(capsys, tmp_path):
    assert figures.main(["--tiny", "--folder", str(tmp_path)]) == 0
    found = {line["figure"]: line["value"] for line in shown(capsys)}
    assert found["fill gives the bits of dequantising"] is True
    assert found["weights of a resumed run - one in a piece"] == 0
    assert {f"seconds of {name}" for name in figures.USUAL} <= set(found)
    assert not any("failed" in name for name in found)


def test_a_part_that_fails_is_told_and_the_next_one_runs(capsys, tmp_path, monkeypatch):
    def fails(session):
        raise RuntimeError("made up")

    monkeypatch.setitem(figures.PARTS, "fit_22", fails)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert figures.main(["--tiny", "--only", "fit_22", "kernels"]) == 1
    lines = shown(capsys)
    assert lines[0] | {"at": 0} == {
        "figure": "fit_22 failed",
        "value": "RuntimeError: made up",
        "bound": "",
        "at": 0,
    }
    assert lines[-1]["figure"] == "seconds of kernels"
    assert [json.loads(line) for line in (tmp_path / "fourbit.jsonl").read_text().splitlines()] == lines
