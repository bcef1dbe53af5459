"""Encodes tables, the body of footers and manifests: a JSON head, then typed little-endian columns."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final, Literal, NamedTuple, overload

from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import Json, iter_fields, iter_object

MAX_TABLE_BYTES: Final = 1 << 30
MAX_COLUMNS: Final = 256
_START: Final = struct.Struct("<IHH")
_COLUMN: Final = struct.Struct("<20sBBHQ")
Letter = Literal["B", "H", "I", "Q", "q"]
_SIZES: Final[dict[Letter, int]] = {"B": 1, "H": 2, "I": 4, "Q": 8, "q": 8}
_MANDATORY: Final = 1
_ALIGN: Final = 8


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of a column: a struct letter of fixed size, and the count of numbers in a row."""

    letter: Letter
    width: int = 1
    mandatory: bool = True
    """A reader that does not know a mandatory column must refuse the table."""
    always: bool = True
    """Whether every table has the column."""

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return _SIZES[self.letter] * self.width


Schema = Mapping[str, ColumnType]


class PackedNames(Sequence[str]):
    """A sequence of strings, stored as one string; items are created when they are read."""

    def __init__(self, names: Sequence[str]) -> None:
        self._text = "".join(names)
        self._ends = array("Q", accumulate(map(len, names)))

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return a name, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = index if index >= 0 else len(self) + index
        return self._text[self._ends[number - 1] if number > 0 else 0 : self._ends[number]]

    def __iter__(self) -> Iterator[str]:
        """Yield all names."""
        start = 0
        for end in self._ends:
            yield self._text[start:end]
            start = end


class RepeatedColumn(Sequence[int]):
    """A column of `count` equal numbers, kept in memory as one number."""

    __slots__ = ("_count", "_value")

    def __init__(self, value: int, count: int) -> None:
        self._value = value
        self._count = count

    def __len__(self) -> int:
        """Return the count of numbers."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> RepeatedColumn: ...
    def __getitem__(self, index: int | slice) -> int | RepeatedColumn:
        """Return the number, or a shorter column for a slice."""
        if type(index) is slice:
            return RepeatedColumn(self._value, len(range(*index.indices(self._count))))
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._value

    def __iter__(self) -> Iterator[int]:
        """Yield the number `count` times."""
        return repeat(self._value, self._count)

    def __bytes__(self) -> bytes:
        """Return the column as bytes; its numbers must be below 256."""
        return bytes([self._value]) * self._count


@dataclass(frozen=True, slots=True)
class Table:
    """A decoded table: its columns contain native numbers, `width` of them per row."""

    head: dict[str, Json]
    columns: Mapping[str, Sequence[int]]


def column(letter: Letter, values: list[int]) -> memoryview:
    """Return `values` as a column of native numbers."""
    # array's own letters for 4 and 8 bytes differ by platform; struct's standard sizes do not.
    return memoryview(struct.pack(f"={len(values)}{letter}", *values)).cast("B").cast(letter)


class LazyColumn(NamedTuple):
    """A column that is created only when it is written."""

    nbytes: int
    make: Callable[[], memoryview]
    """Returns the native numbers, `nbytes` bytes of them."""


def encode_table(head: Mapping[str, Json], columns: Mapping[str, memoryview], schema: Schema) -> bytes:
    """Encode a table; `columns` must have every column of `schema` that a table always has."""
    return bytes(consume_table(dict(head), dict(columns), schema))


def consume_table(
    head: dict[str, Json], columns: dict[str, memoryview] | dict[str, memoryview | LazyColumn], schema: Schema
) -> memoryview:
    """Encode a table as `encode_table` does, and remove each field and column from the arguments once it is copied.

    A large table then needs little more than its own memory, if the caller keeps no other reference to them.
    """
    schema = {name: kind for name, kind in schema.items() if kind.always or name in columns}
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
        del column, native, body  # free their memory before the next column is created
    return table


def _new_memory(size_bytes: int) -> memoryview:
    """Return zeroed memory that is allocated page by page when written, and freed with the last view of it."""
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
    missing = [name for name, kind in schema.items() if kind.always and name not in columns]
    if missing or cursor.rest:
        what = f"column {missing[0]!r} is missing" if missing else "bytes after the table"
        raise Corrupt(f"{where}: {what}", key=where)
    # Last, and after the table is freed: with many entries, the head takes more memory than anything else.
    del data, cursor, body
    head: dict[str, Json] = {}
    for name, value in fields:
        head[name] = convert[name](value) if convert and name in convert else value
        del value  # free it before the next one is parsed
    return Table(head, columns)


def _copy_column(body: memoryview, kind: ColumnType) -> Sequence[int]:
    """Return a copy of a column; a view would keep the whole table in memory, with the text of the head."""
    view = body.cast(kind.letter)
    # A column of one byte per row is small anyway, and faster as a plain view.
    if kind.row_bytes > 1 and len(view) > 1 and view[1:] == view[:-1]:
        return RepeatedColumn(_swap(view[:1], kind.letter)[0], len(view))
    return _swap(memoryview(bytes(body)).cast(kind.letter), kind.letter)


class _Cursor:
    """Reads a buffer from front to back, never past its end."""

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


def _swap(view: memoryview, letter: Letter) -> memoryview:
    """Convert native numbers to little-endian or back; a no-op on little-endian machines."""
    if sys.byteorder == "little" or letter == "B":
        return view
    swapped = array(letter, view.tolist())
    swapped.byteswap()
    return memoryview(swapped)
