"""Every folder of tests is a part of the core suites or is left out for a reason."""

from __future__ import annotations

from collections.abc import Iterable

from tests.matrix.environments import ROOT
from tests.matrix.selection import CORE, LEFT_OUT, SLOW


def find_undecided(files: Iterable[str]) -> list[str]:
    """Return the test files that are neither in a core suite nor left out."""
    decided = tuple(path if path.endswith(".py") else f"{path}/" for path in (*CORE, *LEFT_OUT))
    return [file for file in files if not file.startswith(decided)]


def _list_test_files() -> list[str]:
    return [file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "tests").glob("**/test_*.py"))]


def test_every_test_file_is_selected_or_left_out() -> None:
    assert find_undecided(_list_test_files()) == []


def test_a_new_folder_of_tests_is_reported() -> None:
    assert find_undecided(["tests/planted/test_any.py", "tests/unit/test_lru.py"]) == ["tests/planted/test_any.py"]


def test_every_selected_path_exists() -> None:
    assert [path for path in (*CORE, *SLOW, *LEFT_OUT) if not (ROOT / path).exists()] == []
