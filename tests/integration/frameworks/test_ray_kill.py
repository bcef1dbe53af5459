"""A Ray Train run whose worker is killed continues as if it had not been."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.kit.capabilities import needs_package
from tests.kit.patience import RUN_S

pytestmark = [pytest.mark.slow, needs_package("ray")]

ROOT = Path(__file__).parents[3]


def run(folder: Path, *options: str) -> list[str]:
    """Run the script; return the words it has printed last: step, whether it was resumed, digest."""
    command = [sys.executable, "-m", "tests.integration.frameworks.ray_run", str(folder), *options]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=RUN_S, check=True)
    return result.stdout.strip().splitlines()[-1].split()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    step, resumed, digest = run(tmp_path_factory.mktemp("whole"))
    assert (step, resumed) == ("8", "False")
    return digest


@pytest.mark.parametrize("options", [("--kill",), ("--kill", "--foreground")])
def test_a_run_with_a_killed_worker_ends_as_the_one_without(
    tmp_path: Path, expected: str, options: tuple[str, ...]
) -> None:
    assert run(tmp_path, *options) == ["8", "True", expected]
    assert holdfast.open(tmp_path / "run" / "holdfast").check(read=True) == []
