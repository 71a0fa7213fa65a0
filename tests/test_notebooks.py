"""The notebooks: committed without outputs, and every cell of them runs, with the assertions that it holds."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
PICTURES = {"attention_tour": 7, "caption_photos": 3, "seq2seq_family": 3}  # how many each of them shows
SECONDS_A_CELL = 900

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'mmattn[notebooks]'")


def test_the_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(PICTURES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_is_valid_and_holds_no_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]
    assert notebook["metadata"].keys() <= {"kernelspec", "language_info"}  # no traces of an editor or a machine


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "notebooks"  # a copy: what a cell writes stays out of the repository
    shutil.copytree(path.parent, folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    add_kernel(tmp_path / "jupyter")
    notebook = execute(path, folder)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == PICTURES[path.stem]


def execute(path: Path, folder: Path) -> Any:
    """Runs a notebook in `folder`, by the kernel "this_python"."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'mmattn[notebooks]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'mmattn[notebooks]'")
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    return nbclient.NotebookClient(
        notebook, kernel_name="this_python", timeout=SECONDS_A_CELL, resources=place
    ).execute()


def add_kernel(folder: Path) -> None:
    """Describes a kernel that is the Python of this test, whatever kernels the user has installed."""
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "this Python",
        "language": "python",
    }
    (folder / "kernels" / "this_python").mkdir(parents=True)
    (folder / "kernels" / "this_python" / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
