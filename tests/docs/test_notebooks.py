"""The notebooks of examples/ run from the first cell to the last and draw their plots."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.docs.notebook import code_cells
from tests.docs.session import ROOT, environment

SHELF = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(SHELF.glob("*.ipynb"))
PLOTS = {"first_run": 2, "own_reward": 1, "label_and_reward_model": 2, "look_at_a_run": 2}


def test_there_is_one_for_each_thing_that_newcomers_do():
    assert {path.stem for path in NOTEBOOKS} == set(PLOTS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_one_without_outputs_whose_links_lead_somewhere(path):
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    identifiers = [cell["id"] for cell in book["cells"]]
    assert len(set(identifiers)) == len(identifiers)
    for cell in book["cells"]:
        kept = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
        assert {name: cell.get(name) for name in ("outputs", "execution_count") if name in cell} == kept
        for target in re.findall(r"\]\(([^)#]+)\)", "".join(cell["source"])):
            assert (path.parent / target).exists(), target
        assert all(len(line) <= 140 for line in cell["source"])
    for source in code_cells(path):
        compile(source, path.name, "exec")


@pytest.mark.docs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path, tmp_path, programs):
    done = subprocess.run(
        [programs / "python", ROOT / "tests" / "docs" / "notebook.py", path],
        check=False,
        cwd=tmp_path,
        env=environment(tmp_path, programs),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = [cell for cell in json.loads((tmp_path / "shown.json").read_text()) if cell]
    assert sum('sandbox="allow-scripts"' in (cell["html"] or "") for cell in shown) == PLOTS[path.stem]
    assert not any(" object at 0x" in cell["text"] for cell in shown)


@pytest.mark.docs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_jupyter_kernel(path, tmp_path, programs, monkeypatch):
    """Where Jupyter is installed beside the development environment: `pip install ipykernel nbclient`."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name, value in environment(tmp_path, programs).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # wherever Jupyter is
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(book, timeout=280, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data for output in outputs if output.output_type in ("execute_result", "display_data")]
    assert sum('sandbox="allow-scripts"' in data.get("text/html", "") for data in shown) == PLOTS[path.stem]
    assert not any(" object at 0x" in data.get("text/plain", "") for data in shown)
