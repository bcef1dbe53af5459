"""Hostile files: `put` ends fast and small, runs nothing, and each file comes back byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attacks.hostile_files import FILES
from tests.kit.patience import PATIENCE_S

MAX_CPU_S = 4.0
"""For `put` and `get` together."""
MAX_EXTRA_KIB = 200 << 10
ROOT = Path(__file__).parents[2]


def find_faults(report: list[dict[str, Any]]) -> Iterator[str]:
    for run in report:
        if run["codes"] != [0, 0]:
            yield f"{run['name']}: put and get ended with {run['codes']}"
        if not run["is_same"]:
            yield f"{run['name']}: came back with other bytes"
        if run["cpu_s"] > MAX_CPU_S:
            yield f"{run['name']}: took {run['cpu_s']:.1f} s"
        if run["extra_kib"] > MAX_EXTRA_KIB:
            yield f"{run['name']}: took {run['extra_kib'] >> 10} MiB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which every hostile file was put and restored, in a process of its own, and the report."""
    made = tmp_path_factory.mktemp("hostile")
    words = [sys.executable, "-m", "attacks.hostile_files", str(made / "report.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(words, cwd=made, env=environment, capture_output=True, timeout=PATIENCE_S, check=True)
    return made


def test_every_hostile_file_comes_back_fast_and_small(folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text())

    assert [run["name"] for run in report["runs"]] == list(FILES)
    assert list(find_faults(report["runs"])) == []
    assert report["check"] == 0


def test_nothing_in_a_file_was_run(folder: Path) -> None:
    files = {f"file-{number}" for number in range(len(FILES))}

    assert set(os.listdir(folder)) == {*files, "store", "out", "report.json"}


def test_the_measure_notices_what_it_should() -> None:
    bad = {"name": "x", "codes": [0, 2], "is_same": False, "cpu_s": 9.0, "extra_kib": 1 << 20}

    assert len(list(find_faults([bad]))) == 4
