"""The demo does what it says, with the smallest training that can be killed in the middle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.kit.capabilities import FSDP

DEMO: Final = Path(__file__).resolve().parents[2] / "examples/demo.py"


def run_demo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(DEMO), *words], capture_output=True, text=True, check=False)


@FSDP
@pytest.mark.slow
def test_the_demo_holds_and_keeps_its_store(tmp_path: Path) -> None:
    place = tmp_path / "kept"

    run = run_demo("--steps", "6", "--layers", "1", "--keep", str(place))

    assert run.returncode == 0, run.stdout + run.stderr
    assert "all 6 losses are equal, to the last bit" in run.stdout
    assert "on 1 rank, the losses of steps 6 to 10 are those of 2 ranks, but for rounding" in run.stdout
    assert "on 3 ranks, the losses of steps 6 to 10 are those of 2 ranks, but for rounding" in run.stdout
    assert "yes: nothing is damaged or missing" in run.stdout
    assert "NO:" not in run.stdout
    assert f"-s {place} show run/step-6" in run.stdout
    assert f"-s {place} serve" in run.stdout
    assert run.stderr == ""
    shown = subprocess.run(
        [Path(sys.executable).with_name("holdfast"), "-s", str(place), "ls"], capture_output=True, text=True, check=True
    )
    assert "undisturbed/step-6" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--steps", "3"), ("--layers", "0"), ("--keep", ".")])
def test_what_the_demo_cannot_do_is_refused(words: tuple[str, ...]) -> None:
    run = run_demo(*words)

    assert run.returncode == 2
    assert "error: " in run.stderr
