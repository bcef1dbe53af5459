"""Hostile stores: every verb ends fast, small and with a sentence, writes nothing outside, and spares `good`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attacks.hostile import ATTACKS, GOOD, Nest, build
from holdfast.cli.main import main
from tests.cli.runs import digest_tree
from tests.kit.patience import PATIENCE_S

MAX_CPU_S = 1.0
"""Of the processor, so that other processes do not count. A wait without work would end at the timeout."""
MAX_EXTRA_KIB = 200 << 10
ROOT = Path(__file__).parents[2]


def attack(name: str, folder: Path, *, plant: Callable[[Nest], None] | None = None) -> dict[str, Any]:
    """Plant an attack and run every verb on it, in a process of its own."""
    build(folder / "sound/store")
    nest = build(folder / "hostile/store")
    (plant or ATTACKS[name])(nest)
    (folder / "out").mkdir()
    words = [sys.executable, "-m", "attacks.run", *map(str, (folder / "sound/store", nest.root, folder / "out"))]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=True)
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def find_faults(report: dict[str, Any]) -> Iterator[str]:
    for run in report["runs"]:
        if run["code"] not in (0, 1, 2) or "Traceback" in run["error"] or "this is a bug" in run["error"]:
            yield f"{run['verb']}: ended with {run['code']}: {run['error'][-600:]}"
        if run["code"] == 2 and not run["error"].startswith("holdfast: "):
            yield f"{run['verb']}: said nothing"
        if run["cpu_s"] > MAX_CPU_S:
            yield f"{run['verb']}: took {run['cpu_s']:.1f} s"
        if run["peak_kib"] - report["baseline_kib"] > MAX_EXTRA_KIB:
            yield f"{run['verb']}: took {(run['peak_kib'] - report['baseline_kib']) >> 10} MiB"
        if "\x1b" in run["out"] + run["error"]:
            yield f"{run['verb']}: commands the terminal"


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_fast_small_and_with_a_sentence(name: str, tmp_path: Path) -> None:
    report = attack(name, tmp_path)
    assert list(find_faults(report)) == []
    assert report["runs"][-1]["out"] == GOOD["config.json"].decode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hostile", "out", "sound"]
    assert [path.name for path in (tmp_path / "hostile").iterdir()] == ["store"]
    assert not Path("/holdfast-evil.txt").exists()


def test_the_measure_notices_what_it_should() -> None:
    bad = {"verb": "ls", "code": 70, "error": "Traceback", "cpu_s": 2.0, "peak_kib": 1 << 20, "out": "\x1b[2J"}
    assert len(list(find_faults({"baseline_kib": 0, "runs": [bad]}))) == 4


def test_links_in_the_target_directory_are_not_followed(tmp_path: Path) -> None:
    nest = build(tmp_path / "store")
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("mine")
    (tmp_path / "out/config.json").symlink_to(tmp_path / "precious/file")
    (tmp_path / "out/model.bin").symlink_to(tmp_path / "precious/new")
    before = digest_tree(tmp_path / "precious")
    for words in ([], ["--overwrite"]):
        assert main(["-s", str(nest.root), "get", "good", str(tmp_path / "out"), *words]) in (0, 2)
        assert digest_tree(tmp_path / "precious") == before
