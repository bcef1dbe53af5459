"""JSON text: one encoding for equal values, and a parser that refuses what no writer makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.errors import Corrupt
from holdfast.json_text import (
    MAX_DEPTH,
    EncodedJson,
    Json,
    canonical_json,
    encode_texts,
    iter_fields,
    iter_object,
    parse_json,
)


def test_equal_values_have_equal_bytes() -> None:
    assert (
        canonical_json({"b": 1, "a": [1, "\u00e9"]})
        == canonical_json({"a": [1, "\u00e9"], "b": 1})
        == '{"a":[1,"é"],"b":1}'.encode()
    )


def test_an_escaped_pair_of_surrogates_is_a_character() -> None:
    assert parse_json(rb'"\ud83d\ude00"', where="x") == "\U0001f600"


@pytest.mark.parametrize("value", [{10: "a", 9: "b"}, {"deep": [{None: 1}]}, {True: 1}, {1.5: 1}])
def test_keys_that_would_come_back_as_other_keys_are_not_encoded(value: Json) -> None:
    with pytest.raises(TypeError, match="key"):
        canonical_json(value)


def test_an_object_is_the_same_whether_or_not_its_fields_are_encoded_before() -> None:
    fields = {"b": {"y": 1, "x": [None, 0.5]}, "a": "\u00e9", "c": []}
    encoded = {name: EncodedJson(canonical_json(value)) for name, value in fields.items()}
    for given in (fields, encoded, {}):
        assert b"".join(iter_object(given)) == canonical_json(fields if given else {})


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 9000])
def test_texts_are_encoded_as_any_list_is(count: int) -> None:
    texts = [f'\u00e9 "{number}", \n' for number in range(count)]

    assert encode_texts(texts) == EncodedJson(canonical_json(texts))


def test_what_would_be_too_deep_in_another_value_is_not_encoded_for_it() -> None:
    value: Json = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    canonical_json(value)
    for encode in (lambda: canonical_json(value, depth=1), lambda: list(iter_object({"x": value}))):
        with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} deep"):
            encode()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        " { } ",
        '{"a":1}\n',
        '{"a" : [1, {"b": null}] ,\t"c" : "x\\u00e9"}',
        '{"a":1,"a":2}',
        '{"a":' + "[" * 249 + "]" * 249 + "}",
        '{"a":' + "[" * 250 + "]" * 250 + "}",
        '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
        "",
        "{",
        "{,}",
        '{"a"}',
        '{"a":}',
        '{"a":1,}',
        '{"a":1]',
        '{"a":1}}',
        '{"a":1}\u00a0',
        '{"a":1 "b":2}',
        "{1:2}",
        '{"a":NaN}',
        '{"a":1e999}',
        '{"a":"\\ud800"}',
        '{"\\ud800":1}',
    ],
    ids=lambda text: text[:20],
)
def test_fields_one_by_one_are_those_of_the_whole_object(text: str) -> None:
    def parse(act: Callable[[], object]) -> object:
        try:
            return act()
        except Corrupt:
            return "damaged"

    whole = parse(lambda: parse_json(text.encode(), where="x"))
    assert parse(lambda: dict(iter_fields(text.encode(), where="x"))) == whole


@pytest.mark.parametrize("data", [b"[]", b"null", b"5", b'"x"', b"\xff{}"])
def test_fields_of_what_is_no_object_are_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        list(iter_fields(data, where="x"))
