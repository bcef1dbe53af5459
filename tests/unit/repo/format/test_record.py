"""Records prove themselves: a torn one is told from a damaged one, and nothing hostile gets through."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from holdfast.digest import fingerprint, hash_bytes
from holdfast.errors import Corrupt, NewerFormat
from holdfast.repo.format.record import (
    MAX_DEPTH,
    EncodedJson,
    Fields,
    Json,
    canonical_json,
    decode_record,
    encode_record,
    encode_texts,
    iter_fields,
    iter_object,
    parse_json,
)
from tests.kit.saving import flip

FIELDS = {"kind": "tag", "name": "caf\u00e9", "generation": 3, "time": 1.5, "keys": ["a", "b"], "more": {"x": None}}
RECORD = encode_record(FIELDS)


def encode_body(body: bytes, *, version: int = 1) -> bytes:
    """Encode a record of any body, honest or not, with a header that fits it."""
    start = f"holdfast-record {version:04x} {len(body):08x} {hash_bytes(body).hex()} ".encode()
    return start + fingerprint(start)[:8].hex().encode() + b"\n" + body


def decode(data: bytes) -> dict[str, Json] | None:
    fields = decode_record(data, key="tags/x@00000003")
    return None if fields is None else fields.values


def test_a_record_decodes_to_what_was_encoded() -> None:
    assert decode(RECORD) == FIELDS


def test_a_record_is_a_text_that_people_can_read() -> None:
    header, body = RECORD.decode().split("\n", 1)
    assert header.startswith("holdfast-record 0001 ")
    assert json.loads(body) == FIELDS


def test_equal_values_have_equal_bytes() -> None:
    assert (
        canonical_json({"b": 1, "a": [1, "\u00e9"]})
        == canonical_json({"a": [1, "\u00e9"], "b": 1})
        == '{"a":[1,"é"],"b":1}'.encode()
    )


def test_every_truncation_is_torn() -> None:
    assert [decode(RECORD[:length]) for length in range(len(RECORD))] == [None] * len(RECORD)


def test_every_flipped_bit_is_damage() -> None:
    for position in range(len(RECORD)):
        for bit in range(8):
            with pytest.raises((Corrupt, NewerFormat)):
                decode(flip(RECORD, position, bit))


def test_bytes_after_the_end_are_damage() -> None:
    with pytest.raises(Corrupt, match="tags/x@00000003 is damaged"):
        decode(RECORD + b"\n")


def test_a_damaged_length_is_not_mistaken_for_a_torn_record() -> None:
    longer = RECORD.replace(f" {len(RECORD) - 112:08x} ".encode(), b" 0fffffff ")
    with pytest.raises(Corrupt, match="damaged header"):
        decode(longer)


def test_a_record_of_a_later_version_asks_for_an_upgrade() -> None:
    with pytest.raises(NewerFormat, match="version 2, this Holdfast reads up to 1: upgrade"):
        decode(encode_body(b"{}\n", version=2))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]\n",
        b"null\n",
        b"{",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a": "\xff"}',
        rb'{"name": "\ud800"}',
        rb'{"\udfff": 1}',
        b"\xff\xfe{\0}\0",
    ],
    ids=lambda body: repr(body[:16]),
)
def test_a_body_that_no_writer_makes_is_damage(body: bytes) -> None:
    with pytest.raises(Corrupt) as caught:
        decode(encode_body(body))
    assert caught.value.key == "tags/x@00000003"


def test_an_escaped_pair_of_surrogates_is_a_character() -> None:
    assert parse_json(rb'"\ud83d\ude00"', where="x") == "\U0001f600"


def test_a_record_is_small() -> None:
    with pytest.raises(ValueError, match=f"a record holds at most {4 << 20} bytes, this one has {(4 << 20) + 9}"):
        encode_record({"x": "a" * (4 << 20)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"", {1, 2}])
def test_what_json_cannot_hold_is_not_encoded(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        encode_record({"value": value})


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


class TestFields:
    fields = Fields(
        "tags/x@00000003",
        {
            "text": "a",
            "count": 5,
            "number": 1.5,
            "mapping": {"a": 1},
            "texts": ["a"],
            "digest": "00" * 32,
            "true": True,
            "negative": -1,
            "huge": 1 << 63,
            "vast": 10**400,
            "null": None,
        },
    )

    def test_accessors_return_what_is_there(self) -> None:
        fields = self.fields
        assert (fields.text("text"), fields.integer("count"), fields.number("number")) == ("a", 5, 1.5)
        assert (fields.mapping("mapping"), fields.texts("texts")) == ({"a": 1}, ("a",))
        assert (fields.digest("digest"), fields.number("count")) == (bytes(32), 5.0)

    @pytest.mark.parametrize(
        ("accessor", "field"),
        [
            ("text", "count"),
            ("text", "absent"),
            ("integer", "text"),
            ("integer", "true"),
            ("integer", "negative"),
            ("integer", "huge"),
            ("integer", "number"),
            ("number", "true"),
            ("number", "text"),
            ("number", "vast"),
            ("number", "absent"),
            ("mapping", "texts"),
            ("mapping", "null"),
            ("texts", "text"),
            ("texts", "mapping"),
            ("digest", "text"),
            ("digest", "absent"),
        ],
    )
    def test_a_field_of_the_wrong_kind_is_damage_and_is_named(self, accessor: str, field: str) -> None:
        with pytest.raises(Corrupt, match=f"tags/x@00000003.*'{field}'"):
            getattr(self.fields, accessor)(field)

    def test_a_list_of_other_things_than_strings_is_damage(self) -> None:
        with pytest.raises(Corrupt, match="not a list of strings"):
            Fields("k", {"a": ["x", 1]}).texts("a")

    def test_a_record_in_the_place_of_another_is_damage(self) -> None:
        with pytest.raises(Corrupt, match="is not its own: its count is '5', its key says '6'"):
            self.fields.expect(text="a", count=6)


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
