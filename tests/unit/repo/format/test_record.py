"""Records prove themselves: torn and damaged ones are distinguished, and hostile ones are refused."""

from __future__ import annotations

import json

import pytest

from holdfast.digest import fingerprint, hash_bytes
from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import (
    Json,
)
from holdfast.repo.format.record import Fields, decode_record, encode_record
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


def test_a_record_is_small() -> None:
    with pytest.raises(ValueError, match=f"a record has at most {4 << 20} bytes, this one has {(4 << 20) + 9}"):
        encode_record({"x": "a" * (4 << 20)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"", {1, 2}])
def test_what_json_cannot_hold_is_not_encoded(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        encode_record({"value": value})


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

    def test_accessors_return_valid_fields(self) -> None:
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
        with pytest.raises(Corrupt, match="belongs to another key: its count is '5', not '6'"):
            self.fields.expect(text="a", count=6)
