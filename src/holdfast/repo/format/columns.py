"""Tables: a JSON head for strings and self-described little-endian columns: the body of footers and manifests."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final, Literal, NamedTuple, overload

from holdfast.errors import Corrupt, NewerFormat
from holdfast.repo.format.record import Json, iter_fields, iter_object

MAX_TABLE_BYTES: Final = 1 << 30
MAX_COLUMNS: Final = 256
_START: Final = struct.Struct("<IHH")
_COLUMN: Final = struct.Struct("<20sBBHQ")
Letter = Literal["B", "H", "I", "Q", "q"]
_SIZES: Final[dict[Letter, int]] = {"B": 1, "H": 2, "I": 4, "Q": 8, "q": 8}
_MANDATORY: Final = 1
_ALIGN: Final = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of a column: a struct letter of fixed size, and how many of them make a row."""

    letter: Letter
    width: int = 1
    mandatory: bool = True
    """A reader that does not know a mandatory column must refuse the table."""

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return _SIZES[self.letter] * self.width


Schema = Mapping[str, Kind]


class RepeatedColumn(Sequence[int]):
    """A column that holds one number many times, kept as that number."""

    __slots__ = ("_count", "_value")

    def __init__(self, value: int, count: int) -> None:
        """Hold `value` at `count` places."""
        self._value = value
        self._count = count

    def __len__(self) -> int:
        """Return how many numbers there are."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> RepeatedColumn: ...
    def __getitem__(self, index: int | slice) -> int | RepeatedColumn:
        """Return the number, or a part of the column."""
        if type(index) is slice:
            return RepeatedColumn(self._value, len(range(*index.indices(self._count))))
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._value

    def __iter__(self) -> Iterator[int]:
        """Yield the number as often as it is there."""
        return repeat(self._value, self._count)

    def __bytes__(self) -> bytes:
        """Return a column of bytes as such."""
        return bytes([self._value]) * self._count


@dataclass(frozen=True, slots=True)
class Table:
    """A decoded table: each column holds native numbers, `width` of them to a row."""

    head: dict[str, Json]
    columns: Mapping[str, Sequence[int]]


def column(letter: Letter, values: list[int]) -> memoryview:
    """Return `values` as a column of native numbers."""
    # array's own letters for 4 and 8 bytes differ by platform; struct's standard sizes do not.
    return memoryview(struct.pack(f"={len(values)}{letter}", *values)).cast("B").cast(letter)


class LazyColumn(NamedTuple):
    """A column that is made when it is written."""

    nbytes: int
    make: Callable[[], memoryview]
    """Returns native numbers, `nbytes` in all."""


def encode_table(head: Mapping[str, Json], columns: Mapping[str, memoryview], schema: Schema) -> bytes:
    """Encode a table; `columns` holds every column of `schema`."""
    return bytes(consume_table(dict(head), dict(columns), schema))


def consume_table(
    head: dict[str, Json], columns: dict[str, memoryview] | dict[str, memoryview | LazyColumn], schema: Schema
) -> memoryview:
    """Encode a table as `encode_table` does, and remove the fields and columns from what is given once they are copied.

    A large table then takes little more than its own memory, if the caller has no other reference to them.
    """
    encoded = list(iter_object(head))
    head.clear()
    head_bytes = sum(map(len, encoded))
    bodies = [columns[name].nbytes for name in schema]
    at = _START.size + _COLUMN.size * len(schema)
    table = _new_memory(at + sum(size + -size % _ALIGN for size in [head_bytes, *bodies]))
    _START.pack_into(table, 0, head_bytes, len(schema), 0)
    for part in encoded:
        table[at : at + len(part)] = part
        at += len(part)
    at += -head_bytes % _ALIGN
    del encoded, part
    for number, (name, kind) in enumerate(schema.items()):
        column = columns.pop(name)
        native = column.make() if isinstance(column, LazyColumn) else column
        body = _swap(native, kind.letter).cast("B")
        assert body.nbytes == bodies[number], name
        rows, rest = divmod(body.nbytes, kind.row_bytes)
        assert not rest, name
        flags = _MANDATORY if kind.mandatory else 0
        described = (name.encode(), ord(kind.letter), flags, kind.width, rows)
        _COLUMN.pack_into(table, _START.size + _COLUMN.size * number, *described)
        table[at : at + body.nbytes] = body
        at += body.nbytes + -body.nbytes % _ALIGN
        del column, native, body  # before the next one is made
    return table


def _new_memory(size_bytes: int) -> memoryview:
    """Return zeros of which only what is written to takes memory, all of it given back when nobody has a view of it."""
    return memoryview(mmap(-1, size_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS))


def decode_table(
    data: memoryview, schema: Schema, *, where: str, convert: Mapping[str, Callable[[Json], Json]] | None = None
) -> Table:
    """Decode a table, checking every length before it is used; raises Corrupt or NewerFormat.

    A field of the head that is in `convert` becomes what that function returns, before the next field is parsed.
    """
    cursor = _Cursor(data, where)
    head_bytes, count, reserved = _START.unpack(cursor.take(_START.size))
    if count > MAX_COLUMNS or reserved:
        raise Corrupt(f"{where}: the table has an impossible start", key=where)
    described = [_COLUMN.unpack(cursor.take(_COLUMN.size)) for _ in range(count)]
    fields = iter_fields(bytes(cursor.take_padded(head_bytes)), where=where)
    columns: dict[str, Sequence[int]] = {}
    body = data[:0]
    for name_bytes, letter_code, flags, width, rows in described:
        name, letter = name_bytes.rstrip(b"\0").decode("ascii", "replace"), chr(letter_code)
        item_bytes = next((size for known, size in _SIZES.items() if known == letter), 0)
        if not item_bytes or name in columns:
            raise Corrupt(f"{where}: column {name!r} is repeated or of an unknown type", key=where)
        body = cursor.take_padded(item_bytes * width * rows)
        if name not in schema:
            if flags & _MANDATORY:
                raise NewerFormat(f"{where} needs the column {name!r}, which this Holdfast does not know: upgrade")
            continue
        if (letter, width) != (schema[name].letter, schema[name].width):
            raise Corrupt(f"{where}: column {name!r} has the wrong type", key=where)
        columns[name] = _copy_column(body, schema[name])
    missing = [name for name in schema if name not in columns]
    if missing or cursor.rest:
        what = f"column {missing[0]!r} is missing" if missing else "bytes after the table"
        raise Corrupt(f"{where}: {what}", key=where)
    # Last, and without the table: of many entries the head takes more memory than all else.
    del data, cursor, body
    head: dict[str, Json] = {}
    for name, value in fields:
        head[name] = convert[name](value) if convert and name in convert else value
        del value  # before the next one is parsed
    return Table(head, columns)


def _copy_column(body: memoryview, kind: Kind) -> Sequence[int]:
    """Return a column in memory of its own; a view would keep the whole table, and with it the text of the head."""
    view = body.cast(kind.letter)
    # Of a byte per row there is little to save, and a view is faster.
    if kind.row_bytes > 1 and len(view) > 1 and view[1:] == view[:-1]:
        return RepeatedColumn(_swap(view[:1], kind.letter)[0], len(view))
    return _swap(memoryview(bytes(body)).cast(kind.letter), kind.letter)


class _Cursor:
    """Takes bytes from the front of a buffer, never past its end."""

    def __init__(self, data: memoryview, where: str) -> None:
        self._data = data
        self._where = where

    @property
    def rest(self) -> int:
        return len(self._data)

    def take(self, size: int) -> memoryview:
        if size > len(self._data):
            raise Corrupt(f"{self._where}: the table ends {size - len(self._data)} bytes early", key=self._where)
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def take_padded(self, size: int) -> memoryview:
        taken = self.take(size)
        if any(self.take(-size % _ALIGN)):
            raise Corrupt(f"{self._where}: padding in the table is not zero", key=self._where)
        return taken


def _padding(size: int) -> bytes:
    return bytes(-size % _ALIGN)


def _swap(view: memoryview, letter: Letter) -> memoryview:
    """Turn native numbers into little-endian ones or back: nothing to do on nearly every machine."""
    if sys.byteorder == "little" or letter == "B":
        return view
    swapped = array(letter, view.tolist())
    swapped.byteswap()
    return memoryview(swapped)
