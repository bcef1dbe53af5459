"""The run of slow tests, in a project of four tests: one passes, one fails, one fails the first time, one is quick."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.slow import run
from tests.slow.record import PAGE, parse_page

_CONFTEST = """
from hypothesis import settings
settings.register_profile("ci-slow")
"""
_TESTS = """
from pathlib import Path
import pytest

@pytest.mark.slow
def test_passes(): pass

@pytest.mark.slow
@pytest.mark.parametrize("value", ["a b", "c"])
def test_fails(value): assert value == "c"

@pytest.mark.slow
def test_fails_once():
    mark = Path(__file__).with_name("mark")
    assert mark.exists() or mark.touch()

def test_is_quick(): assert False
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with slow tests in `tests/here`, in which `run` works."""
    (tmp_path / "tests/here").mkdir(parents=True)
    (tmp_path / "tests/slow").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow"]\n')
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "tests/here/test_these.py").write_text(_TESTS)
    (tmp_path / ".gitignore").write_text("mark\n__pycache__\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    return tmp_path


def test_slow_tests_are_listed_by_file() -> None:
    assert {file: len(tests) for file, tests in run.list_tests(["tests"]).items()} == {"tests/here/test_these.py": 4}


def test_what_fails_is_run_once_more_alone(capfd: pytest.CaptureFixture[str]) -> None:
    done = run.run_tests(["tests/here"], "0")

    assert done.passed == 2
    assert [name.rpartition("::")[2] for name in done.failed] == ["test_fails[a b]"]
    assert [name.rpartition("::")[2] for name in done.unstable] == ["test_fails_once"]
    assert "2 failed: once more, alone" in capfd.readouterr().out


def test_a_whole_run_is_recorded(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--jobs", "0", "whole"]) == 1

    record = parse_page((project / PAGE).read_text())
    found = record.folders["tests/here"]
    assert (found.passed, found.failed, found.unstable, found.skipped) == (2, 1, 1, 0)
    assert not found.commit.endswith("+")
    assert list(record.seconds) == ["tests/here/test_these.py"]
    assert "failed twice: " in capfd.readouterr().out


def test_a_changed_checkout_is_recorded_as_such(project: Path) -> None:
    (project / "tests/here/test_these.py").write_text("import pytest\n@pytest.mark.slow\ndef test_passes(): pass\n")

    assert run.main(["--jobs", "0", "whole", "tests/here"]) == 0

    assert parse_page((project / PAGE).read_text()).folders["tests/here"].commit.endswith("+")


@pytest.mark.slow
def test_a_slice_runs_tests_and_says_which(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / PAGE).write_text("| `tests/here/test_these.py` | 3800.0 |\n")  # so long that each test is a slice

    assert [run.main(["--jobs", "0", "slice", "--number", str(number)]) for number in (2, 4)] == [1, 0]

    said = capfd.readouterr().out
    assert "slice 4 of 4: 1 of 4 slow tests" in said
    assert "unstable: " in said


def test_a_slice_is_chosen_by_the_commit(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / PAGE).write_text("")

    run.main(["--jobs", "0", "slice"])

    assert "slice 1 of 1: 4 of 4 slow tests" in capfd.readouterr().out


def test_a_file_that_cannot_be_imported_is_no_success(project: Path) -> None:
    (project / PAGE).write_text("")
    (project / "tests/here/test_these.py").write_text("import nothing_of_this_name")

    with pytest.raises(run.NotRun, match="could not collect"):
        run.main(["slice", "--number", "1"])
