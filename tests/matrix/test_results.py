"""Results are read from reports of pytest, added, written and read again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix.results import Outcome, PairResult, add_outcomes, read_report, read_results, write_result

_TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip(reason="this torch has no float31")
@pytest.mark.parametrize("n", [1, 2])
def test_skipped(n): pass
@pytest.fixture
def broken(): raise ValueError
def test_cannot_start(broken): pass
@pytest.fixture
def torn(): yield; raise ValueError
def test_fails_and_cannot_end(torn): assert False
"""


def make_result(pair: str, outcome: Outcome | None = None) -> PairResult:
    """Return a result; without failures if no outcome is given."""
    return PairResult(pair, "3.10.13", "2.6.0", "2.2.6", "", outcome or Outcome(passed=7))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run of pytest with every outcome."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "test_any.py").write_text(_TESTS, encoding="utf-8")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=False)
    return folder / "report.xml"


def test_a_report_is_counted(report: Path) -> None:
    failed = ["test_any::test_cannot_start", "test_any::test_fails", "test_any::test_fails_and_cannot_end"]

    assert read_report(report) == Outcome(1, failed, {"this torch has no float31": 2})


def test_the_outcomes_of_several_runs_are_added() -> None:
    first = Outcome(3, ["b"], {"x": 1, "y": 2})

    assert add_outcomes([first, Outcome(4, ["a"], {"y": 5})]) == Outcome(7, ["a", "b"], {"x": 1, "y": 7})


def test_results_are_read_as_they_were_written_sorted_by_version(tmp_path: Path) -> None:
    results = [make_result("3.9-2.6"), make_result("3.10-2.6", Outcome(1, ["a"], {"x": 2})), make_result("3.10-2.13")]
    for result in reversed(results):
        write_result(tmp_path, result)

    assert read_results(tmp_path) == results


def test_a_new_result_replaces_that_of_its_pair_alone(tmp_path: Path) -> None:
    kept, old, new = make_result("3.10-2.6"), make_result("3.11-2.13"), make_result("3.11-2.13", Outcome(passed=8))
    for result in (kept, old, new):
        write_result(tmp_path, result)

    assert read_results(tmp_path) == [kept, new]
