"""Globs: what each sign matches, and that no pattern takes exponential time."""

from __future__ import annotations

import pytest

from holdfast.query.globs import Glob, is_glob, split_literal


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("run/*", ["run/1", "run/step-10", "run/.x"], ["run", "run/a/b", "other/1", "run/"[:-1]]),
        ("run/step-?0", ["run/step-10"], ["run/step-100", "run/step-0"]),
        ("run/[12]", ["run/1", "run/2"], ["run/3", "run/12"]),
        ("run/[!12]", ["run/3"], ["run/1"]),
        ("**", ["a", "a/b", "a/b/c"], []),
        ("run/**", ["run/a", "run/a/b"], ["run", "runs/a"]),
        ("**/best", ["best", "a/best", "a/b/best"], ["a/bestof", "best/a"]),
        ("a/**/z", ["a/z", "a/b/z", "a/b/c/z"], ["a", "az", "a/z/y"]),
        ("a/**/b/**", ["a/b/c", "a/x/b/c", "a/b/b"], ["a/b", "a/x/b"]),
        ("*", ["a"], ["a/b"]),
        ("a[*]b", ["a*b"], ["axb"]),
        ("a[b", ["a[b"], ["ab"]),
        ("a.b", ["a.b"], ["axb"]),
        ("größe-*", ["größe-1"], ["grosse-1"]),
    ],
)
def test_a_glob_matches_these_names(pattern: str, matching: list[str], others: list[str]) -> None:
    glob = Glob(pattern)

    assert [name for name in [*matching, *others] if glob.matches(name)] == matching


def test_a_pattern_of_many_stars_is_matched_in_no_time() -> None:
    assert not Glob("*a" * 30 + "b").matches("a" * 4000)
    assert not Glob("**/" * 30 + "x").matches("/".join("a" * 2000))
    assert Glob("/".join(["**"] * 50)).matches("a/" * 1000 + "a")


def test_special_characters_and_the_literal_start_are_found() -> None:
    assert [is_glob(text) for text in ("run/1", "run/*", "a?", "a[1]")] == [False, True, True, True]
    assert [split_literal(text) for text in ("run/1", "run/s*", "*", "a[1]")] == ["run/1", "run/s", "", "a"]
