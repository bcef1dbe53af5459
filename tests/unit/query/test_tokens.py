"""Tokens: values with units, dates, texts, fields with odd keys, and characters that begin nothing."""

from __future__ import annotations

import math
from datetime import datetime, timezone

import pytest

from holdfast.errors import BadExpression
from holdfast.query.expression import MAX_TEXT, Reader, parse_date


def read(text: str) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for token in Reader(text).iter_tokens():
        found.append((token.kind, token.path or (token.value if token.kind == "value" else token.text)))
    assert found.pop() == ("end", "")
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("0.3", 0.3),
        (".5", 0.5),
        ("1e-3", 1e-3),
        ("1_000", 1000),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("2d", 172800.0),
        ("3h50m", 13800.0),
        ("90s", 90.0),
        ("1GiB", 1 << 30),
        ("1G", 1 << 30),
        ("1.5KiB", 1536.0),
        ("10B", 10),
        ("true", True),
        ("null", None),
        ("'it'", "it"),
        ('"it\'s"', "it's"),
        (r"'it\'s'", "it's"),
    ],
)
def test_a_value_is_read_with_its_unit(text: str, value: object) -> None:
    ((kind, found),) = read(text)

    assert (kind, found, type(found)) == ("value", value, type(value))


def test_a_date_is_a_time() -> None:
    when = datetime(2026, 11, 17, 14, 30, tzinfo=timezone.utc).timestamp()

    assert read("2026-11-17T14:30Z") == [("value", when)]
    assert read("2026-11-17 14:30:00Z") == [("value", when)]
    assert read("2026-11-17T16:30+02:00") == [("value", when)]
    assert parse_date("2026-11-17") == datetime(2026, 11, 17).astimezone().timestamp()
    assert parse_date("yesterday") is None


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("loss", ("loss",)),
        ("metrics.loss", ("metrics", "loss")),
        ("val/loss", ("val/loss",)),
        ("train-loss", ("train-loss",)),
        ("top@5", ("top@5",)),
        ("größe", ("größe",)),
        ("['val loss']", ("val loss",)),
        ("metrics['a.b'].c.d", ("metrics", "a.b", "c", "d")),
    ],
)
def test_a_field_has_the_keys_that_were_typed(text: str, path: tuple[str, ...]) -> None:
    assert read(text) == [("field", path)]


def test_signs_and_words_need_no_spaces_where_nothing_is_ambiguous() -> None:
    assert read("(loss<=-1)AND not x") == [
        ("sign", "("),
        ("field", ("loss",)),
        ("sign", "<="),
        ("value", -1),
        ("sign", ")"),
        ("word", "and"),
        ("word", "not"),
        ("field", ("x",)),
    ]


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("loss $ 3", 5, "'$' does not belong here"),
        ("loss < 3x", 7, "'3x' is no number, duration or size"),
        ("age < 3d2x", 6, "'3d2x' is no number, duration or size"),
        ("name = 'run", 7, "this quotation mark has no second one"),
        ("created > 2026-13-40", 10, "'2026-13-40' is not a date"),
        ("a[loss] < 1", 1, "expected a key in quotation marks and brackets"),
        ("a['x' < 1", 1, "expected a key in quotation marks and brackets"),
    ],
)
def test_what_is_no_token_is_shown_with_its_place(text: str, position: int, reason: str) -> None:
    with pytest.raises(BadExpression, match="^" + reason.replace("$", r"\$")) as caught:
        list(Reader(text).iter_tokens())

    assert caught.value.position == position
    assert str(caught.value).splitlines()[1:] == [f"  {text}", "  " + " " * position + "^"]


def test_an_expression_that_is_too_long_is_refused_at_once() -> None:
    with pytest.raises(BadExpression, match=f"has {MAX_TEXT + 1} characters; at most {MAX_TEXT}"):
        Reader("x" * (MAX_TEXT + 1))


def test_a_number_of_too_many_digits_is_one_sentence() -> None:
    # Python converts at most 4,300 digits; the limit on the length is lower, unless the interpreter's was lowered.
    assert read("9" * 4000) == [("value", int("9" * 4000))]
