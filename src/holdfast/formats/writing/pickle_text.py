"""Writes pickles of plain values and tensors, opcode by opcode: only what torch's weights-only reader accepts.

No object is asked how to pickle itself, so nothing but the opcodes below can be in the result.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from holdfast.formats.writing.plain_values import TensorRef
from holdfast.tensors.dtypes import dtype_name

_PROTOCOL: Final = b"\x80\x02"
_STOP: Final = b"."
_MARK, _TUPLE, _REDUCE, _PERSISTENT = b"(", b"t", b"R", b"Q"
_EMPTY_DICT, _EMPTY_LIST, _SET_ITEMS, _APPEND_ITEMS = b"}", b"]", b"u", b"e"
_CONSTANTS: Final = {None: b"N", True: b"\x88", False: b"\x89"}
_LONG1: Final = b"\x8a"
_BUILD: Final = b"b"


class PickleText:
    """Encodes one value as a pickle; `encode_tensor` returns the opcodes for a tensor."""

    def __init__(self, encode_tensor: Callable[[TensorRef], bytes]) -> None:
        self._encode_tensor = encode_tensor

    def encode(self, value: Any) -> bytes:
        """Return a whole pickle."""
        return _PROTOCOL + self.encode_value(value) + _STOP

    def encode_value(self, value: Any) -> bytes:
        """Return the opcodes for a value inside a pickle."""
        kind = type(value)
        if isinstance(value, TensorRef):
            return self._encode_tensor(value)
        if value is None or kind is bool:
            return _CONSTANTS[value]
        if isinstance(value, torch.dtype):
            return name_global("torch", dtype_name(value))
        if isinstance(value, torch.device):
            return call("torch", "device", [encode_text(str(value))])
        return self._encode_container(value) if kind in _CONTAINERS else _SCALARS[kind](value)

    def _encode_container(self, value: Any) -> bytes:
        kind = type(value)
        if kind in (dict, OrderedDict):
            pairs = b"".join(self.encode_value(each) for pair in value.items() for each in pair)
            start = _EMPTY_DICT if kind is dict else EMPTY_ORDERED_DICT
            attributes = vars(value) if kind is OrderedDict else {}
            return start + _MARK + pairs + _SET_ITEMS + (self.encode_value(attributes) + _BUILD if attributes else b"")
        items = [self.encode_value(each) for each in value]
        if kind is tuple:
            return encode_tuple(items)
        if kind is torch.Size:
            return call("torch", "Size", [encode_tuple(items)])
        listed = _EMPTY_LIST + _MARK + b"".join(items) + _APPEND_ITEMS
        return call("builtins", "set", [listed]) if kind is set else listed


def name_global(module: str, name: str) -> bytes:
    """Return the opcode for a class or function by name."""
    return f"c{module}\n{name}\n".encode()


def encode_tuple(items: Iterable[bytes]) -> bytes:
    """Return the opcodes for a tuple of encoded items."""
    return _MARK + b"".join(items) + _TUPLE


def call(module: str, name: str, arguments: Iterable[bytes]) -> bytes:
    """Return the opcodes for a call of a function or class."""
    return name_global(module, name) + encode_tuple(arguments) + _REDUCE


def refer(arguments: Iterable[bytes]) -> bytes:
    """Return the opcodes for a persistent reference, which the reader resolves."""
    return encode_tuple(arguments) + _PERSISTENT


def encode_int(value: int) -> bytes:
    """Return the opcode for an integer of at most 255 bytes."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes((value,))
    if -1 << 31 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return _LONG1 + bytes((len(data),)) + data


def encode_text(value: str) -> bytes:
    """Return the opcode for a text."""
    data = value.encode(errors="surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def encode_flag(*, value: bool) -> bytes:
    """Return the opcode for a bool."""
    return _CONSTANTS[value]


def _encode_bytes(value: bytes) -> bytes:
    return call("_codecs", "encode", [encode_text(value.decode("latin1")), encode_text("latin1")])


def _encode_float(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


EMPTY_ORDERED_DICT: Final = call("collections", "OrderedDict", [])
_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple, set, torch.Size})
_SCALARS: Final[dict[type, Callable[[Any], bytes]]] = {
    int: encode_int,
    float: _encode_float,
    str: encode_text,
    bytes: _encode_bytes,
    bytearray: lambda value: call("builtins", "bytearray", [_encode_bytes(bytes(value))]),
    complex: lambda value: call("builtins", "complex", [_encode_float(value.real), _encode_float(value.imag)]),
}
