"""Every module has a test file that bears its name, so that a newcomer finds the tests of a line at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import PurePosixPath
from typing import Final

from tests.architecture.sources import read_sources

# Modules whose tests have another name, and why that is better.
ELSEWHERE: Final = {
    "dcp.py": "distributed/dcp/test_install.py",  # it only names what the rooms below it define
    "capture/stored/events.py": "unit/capture/stored/test_segments.py",  # a record; segments write and read it
    "repo/write/world.py": "unit/repo/write/test_writer_ranks.py",  # a protocol; the writer calls it
    "testing/ranks.py": "distributed/test_ranks.py",
    "testing/store_contract.py": "contract/test_stores.py",  # it is itself a suite, run there on every store
}


def list_folders(module: str) -> list[str]:
    """Return the folders of tests/ in which the tests of a module may be."""
    folder = str(PurePosixPath(module).parent)
    first, _, rest = folder.partition("/")
    unit = f"unit/{folder}" if folder != "." else "unit"
    if first == "cli":
        return ["cli"]
    return [unit, f"distributed/{rest}"] if first == "distributed" else [unit]


def find_without_tests(modules: Iterable[str], tests: Collection[str]) -> list[str]:
    """Return the modules without a test file `test_<module>.py` or `test_<module>_<topic>.py`."""
    stems = {(str(PurePosixPath(test).parent), PurePosixPath(test).stem) for test in tests}

    def has_tests(module: str) -> bool:
        name = f"test_{PurePosixPath(module).stem}"
        folders = list_folders(module)
        return any(folder in folders and (stem == name or stem.startswith(f"{name}_")) for folder, stem in stems)

    return [module for module in modules if ELSEWHERE.get(module) not in tests and not has_tests(module)]


def find_strangers(tests: Iterable[str], modules: Collection[str]) -> list[str]:
    """Return the unit tests that bear the name of no module in their folder."""
    by_folder: dict[str, list[str]] = {}
    for module in modules:
        by_folder.setdefault(list_folders(module)[0], []).append(PurePosixPath(module).stem)

    def is_known(test: str) -> bool:
        path = PurePosixPath(test)
        names = [f"test_{name}" for name in by_folder.get(str(path.parent), ())]
        return any(path.stem == name or path.stem.startswith(f"{name}_") for name in names)

    return [test for test in tests if test.startswith("unit/") and not is_known(test)]


def _list_modules() -> list[str]:
    names = [source.in_package for source in read_sources("src/holdfast")]
    return [name for name in names if not name.endswith("__init__.py")]


def _list_tests() -> list[str]:
    names = [source.path.removeprefix("tests/") for source in read_sources("tests")]
    return [name for name in names if PurePosixPath(name).name.startswith("test_")]


def test_every_module_has_tests_of_its_name() -> None:
    assert find_without_tests(_list_modules(), _list_tests()) == []


def test_every_unit_test_bears_the_name_of_a_module() -> None:
    assert find_strangers(_list_tests(), _list_modules()) == []


def test_no_line_about_tests_elsewhere_is_left_over() -> None:
    modules = _list_modules()

    assert [module for module in ELSEWHERE if module not in modules] == []


def test_a_module_without_tests_is_reported() -> None:
    modules = ["a/b.py", "cli/verbs/rm.py", "distributed/dcp/reader.py", "digest.py", "dcp.py"]
    tests = ["unit/a/test_bad.py", "cli/test_rm_all.py", "distributed/dcp/test_reader.py", "unit/test_digest.py"]

    assert find_without_tests(modules, tests) == ["a/b.py", "dcp.py"]


def test_a_unit_test_of_no_module_is_reported() -> None:
    tests = ["unit/a/test_b.py", "unit/a/test_b_more.py", "unit/a/test_bc.py", "unit/test_b.py", "cli/test_any.py"]

    assert find_strangers(tests, ["a/b.py"]) == ["unit/a/test_bc.py", "unit/test_b.py"]
