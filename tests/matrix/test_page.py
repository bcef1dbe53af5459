"""The page on compatibility shows what the results say."""

from __future__ import annotations

from tests.matrix.page import render_compatibility
from tests.matrix.results import Outcome, PairResult

_LACK = "this torch has no float31"
_RESULTS = [
    PairResult("3.10-2.6", "3.10.13", "2.6.0", "2.2.6", "not with torch 2.6", Outcome(1234, ["a::b"], {_LACK: 3})),
    PairResult("3.11-2.13", "3.11.7", "2.13.0", "2.4.6", "", Outcome(5, [], {"needs root | a tmpfs": 2})),
]


def _read_section(title: str) -> str:
    page = render_compatibility(_RESULTS)
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def test_each_pair_has_a_row_with_its_numbers() -> None:
    rows = _read_section("What was run")

    assert "| 3.10-2.6 | 3.10.13 | 2.6.0 | 2.2.6 | 1,234 | 1 | 3 |\n" in rows
    assert "| 3.11-2.13 | 3.11.7 | 2.13.0 | 2.4.6 | 5 | 0 | 2 |\n" in rows


def test_a_test_that_failed_is_named() -> None:
    assert "Failed with 3.10-2.6:\n\n- `a::b`\n" in _read_section("What was run")


def test_what_a_version_lacks_has_a_row_with_the_number_of_tests_of_each_pair() -> None:
    rows = _read_section("What a version lacks").splitlines()

    assert rows[-1] == f"| {_LACK} | 3 |  |"


def test_a_skip_for_another_reason_is_listed_apart() -> None:
    assert "| needs root \\| a tmpfs |  | 2 |\n" in _read_section("Other tests that were skipped")


def test_the_compile_cache_is_used_or_bypassed_for_a_reason() -> None:
    rows = _read_section("The compile cache")

    assert "| 3.10-2.6 | not with torch 2.6 |\n" in rows
    assert "| 3.11-2.13 | is used |\n" in rows
