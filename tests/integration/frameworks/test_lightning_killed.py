"""A Lightning run that is killed or told to stop continues as if it had not been, alone and on two ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.kit.capabilities import needs_package
from tests.kit.patience import RUN_S

pytestmark = [pytest.mark.slow, needs_package("lightning")]

ROOT = Path(__file__).parents[3]
STRATEGIES = ["auto", "ddp", "sharded"]


def run(folder: Path, *options: str) -> tuple[int, list[str]]:
    """Run the script; return its exit code and the words it has printed last: first step, last step, digest.

    Lightning starts the second rank. The output ends when both ranks have ended.
    """
    command = [sys.executable, "-m", "tests.integration.frameworks.lightning_run", str(folder), *options]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=RUN_S, check=False)
    return result.returncode, [word for line in result.stdout.splitlines()[-1:] for word in line.split()]


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(strategy: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of a run that nothing has interrupted."""
    code, words = run(tmp_path_factory.mktemp("whole"), "--strategy", strategy)
    assert (code, words[:2]) == (0, ["0", "12"])
    return words[2]


def test_a_killed_run_ends_as_the_one_that_was_not(tmp_path: Path, strategy: str, expected: str) -> None:
    code, _ = run(tmp_path, "--strategy", strategy, "--signal", "SIGKILL")
    assert code == -signal.SIGKILL

    assert run(tmp_path, "--strategy", strategy, "--resume", "last") == (0, ["6", "12", expected])
    assert holdfast.open(tmp_path / "store").check() == []


@pytest.mark.parametrize("strategy", STRATEGIES[1:], indirect=True, scope="module")
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_run_of_which_one_rank_was_killed_ends_as_the_one_that_was_not(
    tmp_path: Path, strategy: str, rank: str, expected: str
) -> None:
    code, _ = run(tmp_path, "--strategy", strategy, "--signal", "SIGKILL", "--ranks", rank)
    assert code != 0

    assert run(tmp_path, "--strategy", strategy, "--resume", "last") == (0, ["6", "12", expected])


@pytest.mark.parametrize("strategy", STRATEGIES[:2], indirect=True, scope="module")
def test_a_run_that_saves_in_the_background_and_is_killed_ends_as_the_one_that_was_not(
    tmp_path: Path, strategy: str, expected: str
) -> None:
    code, _ = run(tmp_path, "--strategy", strategy, "--background", "--signal", "SIGKILL")
    assert code == -signal.SIGKILL

    # The save of step 6 may have been written or not when the process was killed.
    code, words = run(tmp_path, "--strategy", strategy, "--background", "--resume", "last")
    assert (code, words[1:]) == (0, ["12", expected])
    assert words[0] in ("3", "6")


# On two ranks, the handler of Lightning 2.6 for SIGTERM calls a collective while the other rank may be in another one,
# and hangs, wherever the checkpoints are.
@pytest.mark.parametrize("strategy", STRATEGIES[:1], indirect=True, scope="module")
def test_a_run_that_is_told_to_stop_saves_its_last_step(tmp_path: Path, strategy: str, expected: str) -> None:
    # Lightning ends such a process with exit code 0, without returning to the script.
    assert run(tmp_path, "--strategy", strategy, "--signal", "SIGTERM") == (0, [])

    assert run(tmp_path, "--strategy", strategy, "--resume", "last") == (0, ["8", "12", expected])


@pytest.mark.parametrize(("before", "after"), [("sharded", "auto"), ("ddp", "sharded")])
def test_a_killed_run_continues_with_another_strategy(tmp_path: Path, before: str, after: str) -> None:
    run(tmp_path, "--strategy", before, "--signal", "SIGKILL")

    code, words = run(tmp_path, "--strategy", after, "--resume", "last")

    assert (code, words[:2]) == (0, ["6", "12"])
