"""Encodes plain values of torch as JSON, and back: dtypes, sizes, devices, layouts and memory formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch

from holdfast.errors import Unsupported
from holdfast.json_text import Json
from holdfast.trees.plain import Decoder, Encoder, take, verify_narrow

_MAX_DEVICES: Final = 128
"""torch stores a device's index in 8 bits, and a larger one wraps around."""
_DEVICE_TYPE: Final = re.compile("[a-z][a-z0-9_]{0,63}")

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
        (name,) = take(node, str)
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
    return torch.Size([verify_narrow(length) for length in take(node, *[int] * (len(node) - 1))])


ENCODERS: Final[Mapping[type, Encoder]] = {
    torch.dtype: _encode_named("dtype"),
    torch.layout: _encode_named("layout"),
    torch.memory_format: _encode_named("memory_format"),
    torch.device: _encode_device,
    torch.Size: lambda value: ["size", *map(int, value)],
}
DECODERS: Final[Mapping[str, Decoder]] = {
    "dtype": _decode_named(_DTYPES),
    "layout": _decode_named(_LAYOUTS),
    "memory_format": _decode_named(_MEMORY_FORMATS),
    "device": _decode_device,
    "size": _decode_size,
}
