"""Encodes plain values of torch and numpy as JSON, and back.

Of torch: dtypes, sizes, devices, layouts and memory formats. Of numpy: scalars, by their bytes. Arrays are not plain
values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import numpy as np
import torch

from holdfast.errors import Unsupported
from holdfast.json_text import Json
from holdfast.trees.plain import (
    Decoder,
    Encoder,
    decode_base64,
    decode_text,
    encode_base64,
    encode_text,
    parse_items,
    verify_narrow,
)

_MAX_DEVICES: Final = 128
"""torch stores a device's index in 8 bits, and a larger one wraps around."""
_DEVICE_TYPE: Final = re.compile("[a-z][a-z0-9_]{0,63}")

_NAMES: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    # Separate types on platforms where int64 is `long`. Last, so that the common types get the fixed-width names.
    *("longlong", "ulonglong"),
)
_NUMPY_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {name: np.dtype(name).newbyteorder("<") for name in _NAMES}
_NAME_OF: Final[Mapping[type, str]] = {_NUMPY_DTYPES[name].type: name for name in reversed(_NAMES)}

_TIME: Final = re.compile(r"(datetime64|timedelta64)(\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")

Named = TypeVar("Named")


def _find_named(kind: type[Named]) -> Mapping[str, Named]:
    """Return torch's constants of one type by the name that str() shows; some have aliases."""
    return {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is kind}


_DTYPES: Final = _find_named(torch.dtype)
_LAYOUTS: Final = _find_named(torch.layout)
_MEMORY_FORMATS: Final = _find_named(torch.memory_format)


def _encode_named(tag: str) -> Encoder:
    return lambda value: [tag, str(value).removeprefix("torch.")]


def _decode_named(constants: Mapping[str, Any]) -> Callable[[list[Json]], object]:
    def decode(node: list[Json]) -> object:
        (name,) = parse_items(node, str)
        if name not in constants:
            raise Unsupported(f"torch {torch.__version__} has no {node[0]} {name[:80]!r}; use the torch that saved it")
        return constants[name]

    return decode


def _encode_device(value: torch.device) -> Json:
    # torch's stub has `int`, but the index is None if none was given.
    index: int | None = value.index
    if index is not None and not 0 <= index < _MAX_DEVICES:
        raise Unsupported(f"a device with the index {index} cannot be saved; torch has at most {_MAX_DEVICES}")
    return ["device", value.type, index]


def _decode_device(node: list[Json]) -> torch.device:
    kind, index = node[1:]
    if type(kind) is not str or not _DEVICE_TYPE.fullmatch(kind):
        raise ValueError("not a type of device")
    if index is not None and (type(index) is not int or not 0 <= index < _MAX_DEVICES):
        raise ValueError("not the index of a device")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError as error:
        raise Unsupported(
            f"torch {torch.__version__} has no device of type {kind!r}; import the package that adds it first"
        ) from error


def _decode_size(node: list[Json]) -> torch.Size:
    return torch.Size([verify_narrow(length) for length in parse_items(node, *[int] * (len(node) - 1))])


def _find_numpy_dtype(name: str) -> np.dtype[Any] | None:
    if found := _TIME.fullmatch(name):
        return np.dtype(f"<{'M8' if found[1] == 'datetime64' else 'm8'}{found[2] or ''}")
    return _NUMPY_DTYPES.get(name)


def _encode_number(value: np.generic) -> Json:
    name = _NAME_OF[type(value)]
    return ["numpy", name, np.asarray(value, _NUMPY_DTYPES[name]).tobytes().hex()]


def _encode_time(value: np.datetime64 | np.timedelta64) -> Json:
    name = value.dtype.name
    dtype = _find_numpy_dtype(name)
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
    name, text = parse_items(node, str, str)
    if name == "bytes":
        return np.bytes_(decode_base64(text))
    dtype, data = _find_numpy_dtype(name), bytes.fromhex(text)
    if dtype is None or len(data) != dtype.itemsize:
        raise ValueError("not a numpy scalar")
    return np.frombuffer(data, dtype)[0]


ENCODERS: Final[Mapping[type, Encoder]] = {
    torch.dtype: _encode_named("dtype"),
    torch.layout: _encode_named("layout"),
    torch.memory_format: _encode_named("memory_format"),
    torch.device: _encode_device,
    torch.Size: lambda value: ["size", *map(int, value)],
    np.longdouble: _encode_long_float,
    np.clongdouble: _encode_long_float,
    **dict.fromkeys(_NAME_OF, _encode_number),
    np.datetime64: _encode_time,
    np.timedelta64: _encode_time,
    # str() of a numpy string drops trailing NULs; str's own method does not.
    np.str_: lambda value: ["numpy", "str", encode_text(str.__str__(value))],
    np.bytes_: lambda value: ["numpy", "bytes", encode_base64(bytes(value))],
}
DECODERS: Final[Mapping[str, Decoder]] = {
    "dtype": _decode_named(_DTYPES),
    "layout": _decode_named(_LAYOUTS),
    "memory_format": _decode_named(_MEMORY_FORMATS),
    "device": _decode_device,
    "size": _decode_size,
    "numpy": _decode_scalar,
}
