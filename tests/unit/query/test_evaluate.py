"""Conditions: what is missing or NaN matches nothing, types do not mix, lists match by their items."""

from __future__ import annotations

import math

import pytest

from holdfast.json_text import Json
from holdfast.query.facts import MISSING
from holdfast.query.select import is_last, order_value
from tests.kit.committed import is_true

METADATA: dict[str, Json] = {
    "metrics": {"loss": 0.25, "bad": "nan", "top": "inf"},
    "step": 1000,
    "note": "run-9",
    "on": True,
    "off": False,
    "none": None,
    "list": ["a", 2],
    "nested": {"x": 1},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss < 0.3", True),
        ("loss < 0.25", False),
        ("loss <= 0.25", True),
        ("loss > 0.3", False),
        ("loss >= 0.25", True),
        ("loss = 0.25", True),
        ("loss == 0.25", True),
        ("loss != 0.25", False),
        ("loss != 1", True),
        ("0.2 < loss", True),
        ("step = 1000.0", True),
        ("loss < step", True),
        ("loss < 0.3 and step >= 1000", True),
        ("loss > 0.3 or step >= 1000", True),
        ("not loss > 0.3", True),
        ("note = 'run-9'", True),
        ("note < 'run-10'", True),
        ("note like 'run-*'", True),
        ("note like 'run'", False),
        ("note !~ 'x*'", True),
        ("step like '1*'", False),
        ("step in (1, 1000)", True),
        ("step not in (1, 1000)", False),
        ("on", True),
        ("off", False),
        ("not off", True),
        ("step", False),
        ("on = true", True),
        ("on = 1", False),
        ("off = 0", False),
        ("on < 2", False),
        ("none = null", True),
        ("step = null", False),
        ("step != null", True),
        ("none exists", True),
        ("none < 1", False),
        ("note < 3", False),
        ("note > 3", False),
        ("note >= 3", False),
        ("3 < note", False),
        ("on > 1", False),
        ("note = 3", False),
        ("note != 3", True),
        ("list = 'a'", True),
        ("list = 2", True),
        ("list = 'b'", False),
        ("list != 'a'", False),
        ("list != 'b'", True),
        ("list > 1", True),
        ("list in ('b', 'a')", True),
        ("list like '?'", True),
        ("nested exists", True),
        ("nested = 1", False),
        ("nested.x = 1", True),
        ("top > 1e300", True),
        ("top = inf", True),
        ("age < 2d", True),
        ("age < 23h", False),
        ("size < 1KiB", True),
        ("created < 2024-01-01", True),
        ("created > '2024-01-01'", False),
        ("env.torch >= '2.9'", True),
        ("tag = 'best'", True),
        ("tag = 'last'", True),
        ("tag = 'other'", False),
        ("name ~ 'run/step-*'", True),
    ],
)
def test_a_condition_holds_or_not(text: str, expected: bool) -> None:
    assert is_true(text, METADATA, tags=("best", "last")) is expected


@pytest.mark.parametrize("sign", ["=", "!=", "<", "<=", ">", ">="])
@pytest.mark.parametrize("field", ["gone", "bad"])
@pytest.mark.parametrize("other", ["0", "'x'", "null", "true", "gone", "bad", "loss"])
def test_what_is_missing_or_nan_matches_nothing(field: str, sign: str, other: str) -> None:
    assert not is_true(f"{field} {sign} {other}", METADATA)
    assert not is_true(f"{other} {sign} {field}", METADATA)


def test_what_is_missing_is_in_no_list_and_like_nothing() -> None:
    assert not is_true("gone in (null, 1)")
    assert not is_true("gone like '**'")
    assert not is_true("gone exists")
    assert not is_true("gone")
    assert not is_true("tag != 'best'")


def test_values_of_all_types_have_one_order() -> None:
    values: list[Json] = [True, "step-10", math.inf, 3, "step-9", False, -1.5, -math.inf]

    ordered = sorted(values, key=order_value)

    assert ordered == [-math.inf, -1.5, 3, math.inf, "step-9", "step-10", False, True]
    assert all(is_last(order_value(value)) for value in (MISSING, None, math.nan, [1], {"a": 1}))
    assert not any(is_last(order_value(value)) for value in values)


def test_numbers_and_texts_of_any_length_are_compared() -> None:
    metadata: dict[str, Json] = {"huge": 10**400, "digits": "9" * 100_000, "more": "9" * 100_001, "deep": [[1]]}

    assert is_true("huge > 1e300 and huge < inf and huge = huge", metadata)
    assert is_true("digits < more and digits != more and digits = digits", metadata)
    assert is_true("digits > '10'", metadata)
    assert not is_true("deep = 1 or deep < 1", metadata)
