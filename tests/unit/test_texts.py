"""Lists and texts that are cut say so."""

from __future__ import annotations

import pytest

from holdfast.texts import list_lines, list_some, shorten


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b", "c"], "a, b, c"),
        (["a", "b", "c", "d"], "a, b, c and 1 more"),
        ([*"abcdefghij"], "a, b, c and 7 more"),
    ],
)
def test_a_list_of_names_ends_with_the_number_of_those_left_out(names: list[str], listed: str) -> None:
    assert list_some(names, 3) == listed


@pytest.mark.parametrize(
    ("lines", "listed"),
    [([], ""), (["a"], "\n  a"), (["a", "b"], "\n  a\n  b"), (["a", "b", "c"], "\n  a\n  b\n  and 1 more")],
)
def test_lines_are_indented_below_the_text_before_them(lines: list[str], listed: str) -> None:
    assert list_lines(lines, 2) == listed


@pytest.mark.parametrize(("text", "cut"), [("", ""), ("12345678", "12345678"), ("123456789", "12345...")])
def test_a_long_text_is_cut_to_the_limit(text: str, cut: str) -> None:
    assert shorten(text, 8) == cut
