"""A Trainer that is killed or told to stop continues as if it had not been."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.testing.ranks import Lost, RankFault, run_ranks
from tests.kit.patience import PATIENCE_S, RUN_S

pytest.importorskip("transformers", reason="needs Transformers, which `make test` installs")
pytest.importorskip("accelerate", reason="needs Accelerate, which `make test` installs")

from tests.integration.frameworks.trainer_run import train_rank  # after the test for the library

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LIMITS: Any = {"timeout_s": RUN_S, "preload": ["tests.integration.frameworks.trainer_run"]}


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


def run_two(folder: Path, faults: dict[int, RankFault] | None = None, **options: Any) -> list[Any]:
    return run_ranks(2, partial(train_rank, **options), folder, 2, **LIMITS, faults=faults)


def names(folder: Path) -> list[str]:
    with holdfast.open(folder / "store") as store:
        return [each.name for each in store.snapshots("run/")]


@pytest.fixture(scope="module")
def expected_of_two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_two(tmp_path_factory.mktemp("two"))


def test_two_killed_ranks_end_as_those_that_were_not(tmp_path: Path, expected_of_two: list[Any]) -> None:
    fault = RankFault(marker=tmp_path / "hanging")

    assert run_two(tmp_path, {0: fault, 1: fault}, hang_at=7) == [Lost(0), Lost(1)]

    assert run_two(tmp_path, resume=True) == expected_of_two


def test_a_signal_to_one_rank_saves_and_stops_both_at_one_step(tmp_path: Path, expected_of_two: list[Any]) -> None:
    first, second = run_two(tmp_path, signalled=1)

    assert first[:2] == [second[0], "another rank was signalled"]
    assert second[1] == "SIGTERM"
    assert names(tmp_path)[-1] == f"run/step-{second[0]}"
    assert run_two(tmp_path, resume=True) == expected_of_two


@pytest.mark.parametrize(("size", "sharded"), [(1, False), (2, True)], ids=["alone", "fsdp2"])
def test_the_best_model_is_loaded_at_the_end_of_a_run_that_was_killed(tmp_path: Path, size: int, sharded: bool) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train = partial(train_rank, best=True, sharded=sharded)
    expected = run_ranks(size, train, whole, size, **LIMITS)
    faults = {rank: RankFault(marker=killed / "hanging") for rank in range(size)}

    run_ranks(size, partial(train, hang_at=7), killed, size, faults=faults, **LIMITS)

    assert "run/step-3" in names(killed), "the best one is kept"
    assert run_ranks(size, partial(train, resume=True), killed, size, **LIMITS) == expected
    assert names(killed) == names(whole) == ["run/step-3", "run/step-12"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_resumes_a_run(tmp_path: Path, before: int, after: int) -> None:
    faults = {rank: RankFault(marker=tmp_path / "hanging") for rank in range(before)}
    run_ranks(before, partial(train_rank, hang_at=7), tmp_path, before, faults=faults, **LIMITS)

    results = run_ranks(after, partial(train_rank, resume=True), tmp_path, after, **LIMITS)

    assert [words[:2] for words in results] == [["12", "-"]] * after
