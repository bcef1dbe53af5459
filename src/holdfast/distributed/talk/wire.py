"""Encodes plain values as bytes for messages between ranks. Types are kept exactly; decoding executes nothing."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

import torch

from holdfast.errors import Corrupt, Unsupported

Frame = bytes
MAX_DEPTH: Final = 100
"""How deep containers may nest. Deeper values are refused, among them a container that contains itself."""

_LENGTH: Final = struct.Struct("<cQ")
_INT: Final = struct.Struct("<cq")
_FLOAT: Final = struct.Struct("<cd")
_CONSTANTS: Final = {None: b"N", True: b"T", False: b"F"}
_SEQUENCES: Final[dict[type, bytes]] = {list: b"l", tuple: b"t", torch.Size: b"z"}
_MAPPINGS: Final[dict[type, bytes]] = {dict: b"d", OrderedDict: b"o"}
_KINDS: Final[dict[bytes, Any]] = {tag: kind for kind, tag in (_SEQUENCES | _MAPPINGS).items()}
_SMALL: Final = 1 << 63


def encode(value: object) -> list[Frame]:
    """Return `value` as pieces of bytes to be joined; `bytes` are not copied. Raises Unsupported if it is not plain.

    Plain values are None, bool, int, float, str, bytes, torch.Size, and lists, tuples, dicts and OrderedDicts of plain
    values. Other subclasses are refused, because they would be decoded as another type.
    """
    pieces: list[Frame] = []
    try:
        _encode(value, pieces, MAX_DEPTH)
    except _Refused as refused:
        path = "".join(f"[{key!r:.80}]" for key in reversed(refused.keys))
        raise Unsupported(
            f"value{path} is {refused.what}, which cannot be sent to another rank; send plain values"
        ) from None
    return pieces


def decode(data: bytes) -> Any:
    """Return the value that `encode` encoded; raise Corrupt if the bytes are not its output."""
    reader = _Reader(data)
    try:
        value = reader.read()
    except (IndexError, struct.error, UnicodeDecodeError, TypeError) as error:
        raise Corrupt(
            f"cannot decode {len(data)} bytes from another rank ({error}); run the same version on all ranks"
        ) from error
    if reader.position != len(data):
        surplus = len(data) - reader.position
        raise Corrupt(f"{surplus} bytes too many from another rank; run the same version on all ranks")
    return value


class _Refused(Exception):
    """A value that is not plain; `keys` is its path, innermost key first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.keys: list[object] = []


def _encode(value: Any, pieces: list[Frame], depth: int) -> None:
    kind = type(value)
    if kind is str:
        data = value.encode("utf-8", "surrogatepass")
        pieces.append(_LENGTH.pack(b"s", len(data)) + data)
    elif kind is int:
        pieces.append(_INT.pack(b"i", value) if -_SMALL <= value < _SMALL else _encode_long(value))
    elif kind is bytes:
        pieces += (_LENGTH.pack(b"b", len(value)), value)
    elif value is None or kind is bool:
        pieces.append(_CONSTANTS[value])
    elif kind is float:
        pieces.append(_FLOAT.pack(b"f", value))
    elif kind in _SEQUENCES:
        pieces.append(_LENGTH.pack(_SEQUENCES[kind], len(value)))
        _encode_items(enumerate(value), pieces, depth)
    elif kind in _MAPPINGS:
        pieces.append(_LENGTH.pack(_MAPPINGS[kind], len(value)))
        for key in value:
            _encode_items([(key, key), (key, value[key])], pieces, depth)
    else:
        raise _Refused(f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", ""))


def _encode_items(items: Iterable[tuple[object, object]], pieces: list[Frame], depth: int) -> None:
    if not depth:
        raise _Refused(f"nested more than {MAX_DEPTH} deep")
    for key, item in items:
        try:
            _encode(item, pieces, depth - 1)
        except _Refused as refused:
            refused.keys.append(key)
            raise


def _encode_long(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return _LENGTH.pack(b"I", len(data)) + data


class _Reader:
    """Decodes the bytes of one value."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def read(self) -> Any:
        tag = self._data[self.position : self.position + 1]
        match tag:
            case b"N" | b"T" | b"F":
                self.position += 1
                return {b"N": None, b"T": True, b"F": False}[tag]
            case b"i":
                return self._unpack(_INT)
            case b"f":
                return self._unpack(_FLOAT)
            case b"s":
                return self._take().decode("utf-8", "surrogatepass")
            case b"b":
                return self._take()
            case b"I":
                return int.from_bytes(self._take(), "little", signed=True)
            case b"l" | b"t" | b"z":
                return _KINDS[tag]([self.read() for _ in range(self._unpack(_LENGTH))])
            case b"d" | b"o":
                return _KINDS[tag]([(self.read(), self.read()) for _ in range(self._unpack(_LENGTH))])
        raise IndexError(f"tag {tag!r} at {self.position}")

    def _unpack(self, form: struct.Struct) -> Any:
        number = form.unpack_from(self._data, self.position)[1]
        self.position += form.size
        return number

    def _take(self) -> bytes:
        size = self._unpack(_LENGTH)
        taken = self._data[self.position : self.position + size]
        if len(taken) != size:
            raise IndexError(f"cut short at {self.position}")
        self.position += size
        return taken
