"""Globs where one snapshot or tag is needed: exactly one match, or one sentence that lists them."""

from __future__ import annotations

import pytest

from tests.cli.runs import Cli


def test_a_glob_that_matches_one_snapshot_is_its_name(filled: Cli) -> None:
    assert filled.ok("show", "run/*-99") == filled.ok("show", "run/step-99")
    assert filled("diff", "run/*-99", "oth*").out == filled("diff", "run/step-99", "other").out
    assert filled.ok("cat", "run/*0", "config.json") == '{"lr": 1}\n'
    filled.ok("tag", "last", "run/*-100")
    assert filled.ok("tag", "last") == "run/step-100\n"


@pytest.mark.parametrize(
    "words", [["show", "run/*"], ["diff", "other", "run/*"], ["diff", "run/*", "other"], ["tag", "new", "run/*"]]
)
def test_a_glob_that_matches_several_lists_them(filled: Cli, words: list[str]) -> None:
    ran = filled(*words)

    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "holdfast: 'run/*' matches 2 snapshots, and one is needed: run/step-99, run/step-100\n"


@pytest.mark.parametrize("words", [["show", "x*"], ["diff", "other", "x*"], ["tag", "new", "x*"]])
def test_a_glob_that_matches_nothing_says_so(filled: Cli, words: list[str]) -> None:
    ran = filled(*words)

    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"holdfast: no snapshot matches 'x*' in {filled.store}; `holdfast ls` lists the snapshots\n"


def test_tags_are_found_by_glob_too(filled: Cli) -> None:
    filled.ok("tag", "worst", "other")

    assert filled.ok("tag", "b*") == "run/step-99\n"
    assert filled("tag", "*st").err == "holdfast: '*st' matches 2 tags, and one is needed: best, worst\n"
    assert filled("tag", "--delete", "*st").code == 2
    assert "no tag 'x*'" in filled("tag", "x*").err
    assert filled.ok("tag", "--delete", "w*") == "deleted tag worst, which pointed to other\n"


def test_a_new_tag_is_never_a_glob(filled: Cli) -> None:
    filled.ok("tag", "b*", "other")

    assert filled.ok("tag", "b*") == "other\n"
    assert filled.ok("tag", "best") == "run/step-99\n"
