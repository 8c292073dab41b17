"""Runs the cells of a notebook in order, in one namespace, as a kernel would: `python tests/docs/notebook.py FILE`.

The last expression of a cell is shown: as HTML where the object can draw itself, else by its `repr`. What each
cell showed is written to `shown.json` in the current folder.
"""

import ast
import json
import sys
from pathlib import Path


def code_cells(path):
    book = json.loads(Path(path).read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def run_cell(source, names):
    """What the cell shows; None where its last statement is not an expression or gives nothing."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    if value is None:
        return None
    return {"text": repr(value), "html": value._repr_html_() if hasattr(value, "_repr_html_") else None}


if __name__ == "__main__":
    namespace = {"__name__": "__main__"}
    shown = [run_cell(source, namespace) for source in code_cells(sys.argv[1])]
    Path("shown.json").write_text(json.dumps(shown), encoding="utf-8")
