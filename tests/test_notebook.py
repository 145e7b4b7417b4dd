"""The notebooks run, from data to an exported model."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"
SHOWN = {"digits.ipynb": "<iframe", "estimator.ipynb": '<img alt="error versus multiply-adds"'}
"""Part of the page that each notebook shows: a report, or the hull of an estimator."""


def test_every_notebook_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits.ipynb", "estimator.ipynb"])
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / name
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises the error of a cell
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    texts = ["".join(output.get("text", "") for output in cell.outputs) for cell in code]
    assert texts[-1].rstrip().endswith("same predictions: True")
    shown = [output for cell in code for output in cell.outputs if "data" in output]
    pages = [output["data"].get("text/html", "") for output in shown]
    picture = SHOWN[name]
    assert any(picture in page for page in pages)
