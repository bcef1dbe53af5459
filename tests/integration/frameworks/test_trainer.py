"""A Trainer that is killed or told to stop continues as if it had not been."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.kit.patience import PATIENCE_S

pytest.importorskip("transformers", reason="needs Transformers, which `make test` installs")
pytest.importorskip("accelerate", reason="needs Accelerate, which `make test` installs")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def run(folder: Path, *options: str) -> tuple[int, list[str]]:
    """Run the script; return its exit code and the words it has printed last: step, stop reason, digest."""
    command = [sys.executable, "-m", "tests.integration.frameworks.trainer_run", str(folder), *options]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    return result.returncode, result.stdout.strip().splitlines()[-1].split() if result.returncode == 0 else []


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    code, words = run(tmp_path_factory.mktemp("whole"))
    assert code == 0
    return words


def test_a_killed_run_ends_as_the_one_that_was_not(tmp_path: Path, expected: list[str]) -> None:
    code, _ = run(tmp_path, "--signal", "SIGKILL")
    assert code == -signal.SIGKILL
    assert holdfast.open(tmp_path / "store").latest("run/") is not None

    assert run(tmp_path, "--resume") == (0, expected)


def test_a_run_that_is_told_to_stop_saves_its_last_step(tmp_path: Path, expected: list[str]) -> None:
    code, words = run(tmp_path, "--signal", "SIGTERM")

    assert (code, words[:2]) == (0, ["8", "SIGTERM"])
    assert holdfast.open(tmp_path / "store").snapshot("run/step-8").metadata["step"] == 8
    assert run(tmp_path, "--resume") == (0, expected)
