"""Tables describe themselves: what a reader must know is refused, what it may ignore is, and no length is believed."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Mapping

import pytest

from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import Json
from holdfast.repo.format.columns import (
    ColumnType,
    LazyColumn,
    Letter,
    RepeatedColumn,
    Schema,
    Table,
    column,
    consume_table,
    decode_table,
    encode_table,
)
from tests.kit.saving import flip

SCHEMA: Schema = {
    "small": ColumnType("B"),
    "wide": ColumnType("B", 3),
    "count": ColumnType("I"),
    "signed": ColumnType("q"),
}
HEAD = {"names": ["a", "\u00e9"], "more": None}
COLUMNS = {
    "small": column("B", [1, 2, 255]),
    "wide": memoryview(b"abcdef"),
    "count": column("I", [7]),
    "signed": column("q", [-1, 1 << 62]),
}
DATA = encode_table(HEAD, COLUMNS, SCHEMA)
START = struct.Struct("<IHH")
COLUMN = struct.Struct("<20sBBHQ")


def decode(data: bytes, schema: Schema = SCHEMA) -> Table:
    return decode_table(memoryview(data), schema, where="packs/x")


def encode_with(extra: Mapping[str, ColumnType]) -> bytes:
    schema = {**SCHEMA, **extra}
    return encode_table(HEAD, {**COLUMNS, **dict.fromkeys(extra, memoryview(b"12345678"))}, schema)


def test_a_table_decodes_to_what_was_encoded() -> None:
    table = decode(DATA)
    assert table.head == HEAD
    assert {name: list(numbers) for name, numbers in table.columns.items()} == {
        "small": [1, 2, 255],
        "wide": list(b"abcdef"),
        "count": [7],
        "signed": [-1, 1 << 62],
    }


@pytest.mark.parametrize("letter", ["B", "H", "I", "Q", "q"])
def test_every_type_keeps_its_extremes(letter: Letter) -> None:
    size = struct.calcsize("=" + letter)
    values = [-(1 << 63), (1 << 63) - 1] if letter == "q" else [0, (1 << 8 * size) - 1]
    schema = {"x": ColumnType(letter)}
    table = decode(encode_table({}, {"x": column(letter, values)}, schema), schema)
    assert list(table.columns["x"]) == values


def test_a_number_that_stands_in_every_row_is_kept_once() -> None:
    schema = {"same": ColumnType("I"), "wide": ColumnType("B", 4), "last": ColumnType("q")}
    columns = {"same": column("I", [7, 7, 7]), "wide": memoryview(bytes(12)), "last": column("q", [-1, -1, 5])}
    table = decode(encode_table({}, columns, schema), schema)

    same, wide = table.columns["same"], table.columns["wide"]
    assert isinstance(same, RepeatedColumn)
    assert isinstance(wide, RepeatedColumn)
    assert not isinstance(table.columns["last"], RepeatedColumn)
    assert (list(same), len(same), same[2], same[-3], list(same[1:])) == ([7, 7, 7], 3, 7, 7, [7, 7])
    assert bytes(wide[4:8]) == bytes(4)
    for index in (3, -4):
        with pytest.raises(IndexError):
            same[index]


def test_a_field_is_converted_before_the_next_is_parsed() -> None:
    texts = [f"text {number}" for number in range(10_000)]
    data = encode_table({"a": texts, "b": texts}, {}, {})
    heads, peaks = [], []
    for convert in ({}, {"a": len}):
        tracemalloc.start(1)
        heads.append(decode_table(memoryview(data), {}, where="packs/x", convert=convert).head)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    assert heads == [{"a": texts, "b": texts}, {"a": len(texts), "b": texts}]
    # One list of strings, of two, and the text of both.
    assert peaks[1] < 0.75 * peaks[0], peaks


def test_numbers_are_little_endian_and_bodies_are_aligned_to_eight_bytes() -> None:
    data = encode_table({}, {"x": column("I", [1])}, {"x": ColumnType("I")})
    assert data[START.size + COLUMN.size :] == b"{}" + bytes(6) + b"\1\0\0\0" + bytes(4)


def test_an_empty_table_is_a_table() -> None:
    assert decode(encode_table({}, {}, {}), {}).columns == {}


def test_a_column_that_must_be_known_is_refused_if_it_is_not() -> None:
    with pytest.raises(
        NewerFormat, match="packs/x needs the column 'later', which this Holdfast does not know: upgrade"
    ):
        decode(encode_with({"later": ColumnType("Q")}))


def test_a_column_that_may_be_ignored_is() -> None:
    table = decode(encode_with({"hint": ColumnType("Q", mandatory=False)}))
    assert set(table.columns) == set(SCHEMA)


def test_a_column_of_another_type_or_width_is_damage() -> None:
    for kind in (ColumnType("H"), ColumnType("I", 2), ColumnType("I", 0)):
        other = {**SCHEMA, "count": kind}
        data = (
            encode_table(HEAD, {**COLUMNS, "count": memoryview(bytes(8 if kind.width else 0))}, other)
            if kind.width
            else None
        )
        with pytest.raises(Corrupt, match="wrong type"):
            decode(data if data is not None else _with_column("count", b"I", 0, 0))


def _with_column(name: str, letter: bytes, width: int, rows: int, *, flags: int = 1, body: bytes = b"") -> bytes:
    """Return a table of one column whose description may be false."""
    head = b"{}" + bytes(6)
    return START.pack(2, 1, 0) + COLUMN.pack(name.encode(), ord(letter), flags, width, rows) + head + body


def test_a_column_that_is_missing_is_damage_and_located() -> None:
    with pytest.raises(Corrupt, match="packs/x: column 'small' is missing") as caught:
        decode(encode_table(HEAD, {}, {}))
    assert caught.value.key == "packs/x"


def test_a_column_that_comes_twice_is_damage() -> None:
    one = COLUMN.pack(b"x", ord("B"), 1, 1, 0)
    with pytest.raises(Corrupt, match="repeated"):
        decode(START.pack(2, 2, 0) + one + one + b"{}" + bytes(6), {"x": ColumnType("B")})


@pytest.mark.parametrize("letter", [b"x", b"\0", b"\xff", b"d", b"P"])
def test_a_column_of_an_unknown_type_is_damage(letter: bytes) -> None:
    with pytest.raises(Corrupt, match="unknown type"):
        decode(_with_column("x", letter, 1, 0), {"x": ColumnType("B")})


def test_bytes_after_the_table_are_damage() -> None:
    with pytest.raises(Corrupt, match="bytes after the table"):
        decode(DATA + bytes(8))


def test_padding_that_is_not_zero_is_damage() -> None:
    with pytest.raises(Corrupt, match="padding"):
        decode(_with_column("x", b"B", 1, 1, body=b"1\0\0\0\0\0\0\1"), {"x": ColumnType("B")})


def test_every_truncation_is_damage() -> None:
    for length in range(len(DATA)):
        with pytest.raises(Corrupt):
            decode(DATA[:length])


def test_a_flipped_bit_is_noticed_or_changes_nothing_but_its_value() -> None:
    """Tables are proven by the digest of their file; here it only must not crash."""
    for position in range(len(DATA)):
        for bit in range(8):
            try:
                table = decode(flip(DATA, position, bit))
            except (Corrupt, NewerFormat):
                continue
            assert set(table.columns) == set(SCHEMA)


@pytest.mark.parametrize("head", ["[]", "null", "5", '"x"'])
def test_a_head_that_is_no_object_is_damage(head: Json) -> None:
    encoded = head.encode()
    data = START.pack(len(encoded), 0, 0) + encoded + bytes(-len(encoded) % 8)
    with pytest.raises(Corrupt, match="not an object"):
        decode(data, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        START.pack(0xFFFFFFFF, 0, 0),
        START.pack(2, 0xFFFF, 0),
        START.pack(2, 1, 0),
        START.pack(2, 0, 1) + b"{}" + bytes(6),
        _with_column("x", b"Q", 1, (1 << 64) - 1),
        _with_column("x", b"Q", 0xFFFF, (1 << 64) - 1),
        _with_column("x", b"Q", 1, 1 << 63),
        _with_column("x", b"Q", 1, 1 << 40, flags=0),
        _with_column("later", b"Q", 0xFFFF, 1 << 60, flags=0),
    ],
)
def test_false_lengths_are_damage_and_allocate_nothing(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            decode(data, {"x": ColumnType("Q")})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_table_that_consumes_its_columns_is_the_same_and_leaves_none() -> None:
    head, columns = dict(HEAD), dict(COLUMNS)

    assert consume_table(head, columns, SCHEMA) == DATA
    assert (head, columns) == ({}, {})


def test_columns_that_are_made_later_give_the_same_table() -> None:
    def defer(values: memoryview) -> LazyColumn:
        return LazyColumn(values.nbytes, lambda: values)

    columns: dict[str, memoryview | LazyColumn] = {name: defer(values) for name, values in COLUMNS.items()}

    assert consume_table(dict(HEAD), columns, SCHEMA) == DATA
