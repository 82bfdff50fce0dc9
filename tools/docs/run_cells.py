"""Runs a script of cells and writes it as a notebook with output: `python -m tools.docs.run_cells SCRIPT NOTEBOOK`.

Cells run one after the other in this process, in the current folder. What a cell prints is its output, and so is the
value of its last line: as HTML if the value has it. An error or a warning ends the run.
"""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import warnings
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat.v4 import new_output


def read(script: Path) -> Any:
    """The notebook of a script, without output."""
    notebook = jupytext.read(script)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for place, cell in enumerate(notebook.cells):
        cell.id = f"cell-{place}"  # equal scripts give equal notebooks
    return notebook


def run(notebook: Any, name: str) -> None:
    """Runs the cells of a notebook and fills in their outputs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            number += 1
            cell.execution_count = number
            cell.outputs = _outputs(cell.source, namespace, f"{name}, cell {number}", number)


def _outputs(source: str, namespace: dict[str, Any], name: str, number: int) -> list[Any]:
    """The outputs of one cell."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs = [new_output("stream", name="stdout", text=printed.getvalue())] if printed.getvalue() else []
    if value is not None:
        data = {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_()
        outputs.append(new_output("execute_result", data=data, execution_count=number))
    return outputs


def main() -> None:
    """Runs the script named first and writes the notebook named second."""
    script, written = map(Path, sys.argv[1:])
    warnings.simplefilter("error")
    notebook = read(script)
    run(notebook, script.name)
    nbformat.write(notebook, written)


if __name__ == "__main__":
    main()
