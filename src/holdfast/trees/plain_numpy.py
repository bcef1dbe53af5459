"""Encodes numpy scalars as JSON by their bytes, and back; arrays are not plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from holdfast.errors import Unsupported
from holdfast.json_text import Json
from holdfast.trees.plain import Decoder, Encoder, decode_base64, decode_text, encode_base64, encode_text, take

_NAMES: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    # Separate types on platforms where int64 is `long`. Last, so that the common types get the fixed-width names.
    *("longlong", "ulonglong"),
)
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {name: np.dtype(name).newbyteorder("<") for name in _NAMES}
_NAME_OF: Final[Mapping[type, str]] = {_DTYPES[name].type: name for name in reversed(_NAMES)}

_TIME: Final = re.compile(r"(datetime64|timedelta64)(\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")


def _find_dtype(name: str) -> np.dtype[Any] | None:
    if found := _TIME.fullmatch(name):
        return np.dtype(f"<{'M8' if found[1] == 'datetime64' else 'm8'}{found[2] or ''}")
    return _DTYPES.get(name)


def _encode_number(value: np.generic) -> Json:
    name = _NAME_OF[type(value)]
    return ["numpy", name, np.asarray(value, _DTYPES[name]).tobytes().hex()]


def _encode_time(value: np.datetime64 | np.timedelta64) -> Json:
    name = value.dtype.name
    dtype = _find_dtype(name)
    if dtype is None:
        raise Unsupported(f"a {name} cannot be saved; convert it to seconds")
    return ["numpy", name, np.asarray(value, dtype).tobytes().hex()]


def _encode_long_float(value: np.generic) -> Json:
    raise Unsupported(
        f"a {type(value).__name__} cannot be saved, because its layout differs between machines;"
        " convert it to float64 or complex128"
    )


def _decode_scalar(node: list[Json]) -> object:
    if node[1:2] == ["str"] and len(node) == 3:
        return np.str_(decode_text(node[2]))
    name, text = take(node, str, str)
    if name == "bytes":
        return np.bytes_(decode_base64(text))
    dtype, data = _find_dtype(name), bytes.fromhex(text)
    if dtype is None or len(data) != dtype.itemsize:
        raise ValueError("not a numpy scalar")
    return np.frombuffer(data, dtype)[0]


ENCODERS: Final[Mapping[type, Encoder]] = {
    np.longdouble: _encode_long_float,
    np.clongdouble: _encode_long_float,
    **dict.fromkeys(_NAME_OF, _encode_number),
    np.datetime64: _encode_time,
    np.timedelta64: _encode_time,
    # str() of a numpy string drops trailing NULs; str's own method does not.
    np.str_: lambda value: ["numpy", "str", encode_text(str.__str__(value))],
    np.bytes_: lambda value: ["numpy", "bytes", encode_base64(bytes(value))],
}
DECODERS: Final[Mapping[str, Decoder]] = {"numpy": _decode_scalar}
