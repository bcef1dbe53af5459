"""The notebook runs from top to bottom, and shows cards instead of reprs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
NOTEBOOK: Final = ROOT / "examples/notebook.ipynb"
# In a process of its own: a kernel's client starts an event loop and threads.
EXECUTE: Final = """
import json, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The cells of the notebook, with their outputs."""
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("notebook")
    target = folder / "executed.ipynb"
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(folder), "IPYTHONDIR": str(folder / "ipython")}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(target)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=variables,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells: list[dict[str, Any]] = json.loads(target.read_text(encoding="utf-8"))["cells"]
    return cells


def list_cards(cells: list[dict[str, Any]]) -> list[str]:
    """Return the HTML of all outputs that have some."""
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return ["".join(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {})]


@pytest.mark.slow
def test_the_notebook_runs_and_shows_a_card_for_each_object(executed: list[dict[str, Any]]) -> None:
    cards = [card for card in list_cards(executed) if 'class="holdfast"' in card]
    kinds = [re.sub(r"<[^>]*>", "", card).split()[0] for card in cards]

    assert kinds == ["Store", "Saved", "Saved", "Store", "Snapshot", "Tensor", "Diff", "Runs"]


@pytest.mark.slow
def test_the_cards_have_what_a_newcomer_looks_for(executed: list[dict[str, Any]]) -> None:
    page = "\n".join(list_cards(executed))

    for text in ("run/step-3", "last", "loss ", "model.layers.#.linear1.weight", "RNG state", "already present"):
        assert text in page
    assert "2.weight" in page  # the origin of the difference between the runs
    assert not re.search(r"<script|https?://|src=", page)


@pytest.mark.slow
def test_nothing_goes_wrong_and_nothing_else_is_printed(executed: list[dict[str, Any]]) -> None:
    outputs = [output for cell in executed for output in cell.get("outputs", ())]

    assert [output for output in outputs if output["output_type"] == "error"] == []
    printed = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    # The progress bar is text, or a widget where ipywidgets is installed.
    bars = [output for output in outputs if "application/vnd.jupyter.widget-view+json" in output.get("data", {})]
    assert bars or "save run/step-1-again: 100%" in printed
    assert "Traceback" not in printed
    assert "Warning" not in printed


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]

    assert [cell["outputs"] for cell in cells if cell.get("outputs")] == []
    assert len({cell["id"] for cell in cells}) == len(cells)


COMPLETE: Final = """
import sys, torch, holdfast
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
store = holdfast.open(sys.argv[1])
store.save("run/step-1", {"model": {"weight": torch.ones(3)}, "step": 1})
shell.user_ns.update(store=store, snapshot=store["run/step-1"])
for text in ('store["ru', 'snapshot["mo', 'snapshot["model.w'):
    print(shell.complete(text)[1])
"""


@pytest.mark.slow
def test_the_tab_key_completes_names_of_snapshots_and_leaves(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"PYTHONPATH": paths, "IPYTHONDIR": str(tmp_path / "ipython")}
    command = [sys.executable, "-c", COMPLETE, str(tmp_path / "ckpts")]

    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)

    assert done.returncode == 0, done.stderr
    names, leaves, below = done.stdout.splitlines()
    assert "run/step-1" in names
    assert "model.weight" in leaves
    assert "step" not in leaves
    assert below.count("model") == 1
