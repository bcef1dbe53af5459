"""Lists and texts that are cut say so; durations are read as people write them."""

from __future__ import annotations

import pytest

from holdfast.errors import BadName
from holdfast.texts import add_note, list_lines, list_some, parse_duration, shorten


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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0), ("90m", 5400), ("12h", 43200), ("7d", 604800), ("2w", 1209600), ("3h50m", 13800), ("1d2h3m4s", 93784)],
)
def test_durations_are_numbers_with_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "d", "7", "7D", "1.5h", "7d ", "\u0667d", "1e3s", "-1s", "7dd", "3m2h", "9" * 5000 + "s"]
)
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(BadName, match="is not a duration"):
        parse_duration(text)


def test_a_note_is_added_to_an_error_once() -> None:
    error = ValueError("bad")

    for text in ("at a", "at b", "at a"):
        add_note(error, text)

    assert error.__dict__["__notes__"] == ["at a", "at b"]
    assert str(error) == "bad"
