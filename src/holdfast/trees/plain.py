"""Encodes plain values of Python and its standard library as JSON, bit for bit, each in exactly one form; and back."""

from __future__ import annotations

import base64
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Final

from holdfast.errors import Unsupported
from holdfast.json_text import Json

Encoder = Callable[[Any], Json]
"""Encodes a value of one exact type; raises Unsupported with the reason for the few values that have no encoding."""
Decoder = Callable[[list[Json]], object]
"""Decodes a node with a known tag; raises ValueError or ArithmeticError if the node is malformed."""

_WIDE_INT: Final = 1 << 63
"""Integers of this size or more are written as text, because other JSON readers round or reject them."""
_MAX_DIVIDED_BITS: Final = 1 << 16
"""The limit for fractions and ranges: to reduce a fraction, or to divide a range's length, takes quadratic time."""

_HEX: Final = re.compile(r"-?[0-9a-f]+")
_DECIMAL: Final = re.compile(r"-?(?:[0-9]+E-?[0-9]{1,20}|Infinity|s?NaN[0-9]*)")


def parse_items(node: list[Json], *kinds: type) -> list[Json]:
    """Return the items after the tag if they have exactly these types, or raise ValueError."""
    items = node[1:]
    if tuple(map(type, items)) != kinds:
        raise ValueError(f"{node[0]!r} has items of the wrong number or type")
    return items


def encode_text(value: str) -> Json:
    """Encode a string: as itself, unless it contains half a surrogate pair, which valid JSON cannot."""
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return ["str", encode_base64(value.encode("utf-8", "surrogatepass"))]
    return value


def decode_text(node: Json) -> str:
    """Decode a string from either form of `encode_text`."""
    if type(node) is str:
        return node
    return decode_base64(_parse_form(node, "str", str)[0]).decode("utf-8", "surrogatepass")


def encode_base64(data: bytes | bytearray) -> str:
    """Encode bytes as base64."""
    return base64.b64encode(data).decode("ascii")


def decode_base64(text: str) -> bytes:
    """Decode text from `encode_base64`."""
    return base64.b64decode(text, validate=True)


def encode_int(value: int) -> Json:
    """Encode an integer: as itself, or in hexadecimal if it is large (linear time, no limit of digits)."""
    return value if -_WIDE_INT < value < _WIDE_INT else ["int", format(value, "x")]


def decode_int(node: Json) -> int:
    """Decode an integer from either form of `encode_int`."""
    if type(node) is int:
        return verify_narrow(node)
    (text,) = _parse_form(node, "int", str)
    if not _HEX.fullmatch(text):
        raise ValueError("not a hexadecimal number")
    return int(text, 16)


def verify_narrow(value: int) -> int:
    """Return an integer of less than 64 bits, or raise ValueError."""
    if not -_WIDE_INT < value < _WIDE_INT:
        raise ValueError("an integer of 64 bits or more is not in hexadecimal")
    return value


def encode_float(value: float) -> Json:
    """Encode a float: as itself if finite, otherwise by its bits, which keep the sign and payload of a NaN."""
    return value if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]


def decode_float(node: Json) -> float:
    """Decode a float from either form of `encode_float`."""
    if type(node) is float:
        return verify_finite(node)
    data = bytes.fromhex(_parse_form(node, "float", str)[0])
    if len(data) != 8:
        raise ValueError("not the bits of a double")
    return float(struct.unpack(">d", data)[0])


def verify_finite(value: float) -> float:
    """Return a finite float, or raise ValueError."""
    if not math.isfinite(value):
        raise ValueError("a float that is not finite is not encoded by its bits")
    return value


def _parse_form(node: Json, tag: str, *kinds: type) -> list[Json]:
    if type(node) is not list or node[:1] != [tag]:
        raise ValueError(f"expected a value of kind {tag}")
    return parse_items(node, *kinds)


def _encode_path(value: PurePath) -> Json:
    text = str(value)
    # A few Windows paths, such as ./c:x, become another path when their text is parsed.
    if type(value)(text) != value:
        raise Unsupported("a path whose text is parsed as another path cannot be saved; convert it to str")
    return ["path", type(value).__name__, encode_text(text)]


# A concrete path of the other operating system cannot be created here, so it is decoded as a pure path.
_PATHS: Final[Mapping[str, type[PurePath]]] = {
    "PosixPath": Path if os.name == "posix" else PurePosixPath,
    "PurePosixPath": PurePosixPath,
    "WindowsPath": Path if os.name == "nt" else PureWindowsPath,
    "PureWindowsPath": PureWindowsPath,
}


def _decode_path(node: list[Json]) -> PurePath:
    flavour, text = node[1:] if len(node) == 3 else (None, None)
    if type(flavour) is not str or flavour not in _PATHS:
        raise ValueError("not a known kind of path")
    return _PATHS[flavour](decode_text(text))


def _encode_timedelta(value: timedelta) -> Json:
    return ["timedelta", value.days, value.seconds, value.microseconds]


def _encode_timezone(value: timezone) -> Json:
    offset, name = value.utcoffset(None), value.tzname(None)
    own_name = None if name == timezone(offset).tzname(None) else encode_text(name)
    return ["timezone", offset.days, offset.seconds, offset.microseconds, own_name]


def _decode_timezone(node: list[Json]) -> timezone:
    delta = timedelta(*parse_items(node[:4], int, int, int))
    (name,) = node[4:]
    return timezone(delta) if name is None else timezone(delta, decode_text(name))


def _encode_tzinfo(value: tzinfo | None) -> Json:
    if value is None:
        return None
    if type(value) is not timezone:
        # The rules of a named zone are in files of the machine, which may differ on another one.
        raise Unsupported(
            f"a time with a {type(value).__qualname__} cannot be saved; convert it with .astimezone(timezone.utc)"
        )
    return _encode_timezone(value)


def _decode_tzinfo(node: Json) -> tzinfo | None:
    if node is None:
        return None
    if type(node) is not list or node[:1] != ["timezone"]:
        raise ValueError("not a time zone")
    return _decode_timezone(node)


def _encode_datetime(value: datetime) -> Json:
    naive = value.replace(tzinfo=None, fold=0)
    return ["datetime", naive.isoformat(), value.fold, _encode_tzinfo(value.tzinfo)]


def _decode_datetime(node: list[Json]) -> datetime:
    text, fold = parse_items(node[:3], str, int)
    (zone,) = node[3:]
    return datetime.fromisoformat(text).replace(fold=fold, tzinfo=_decode_tzinfo(zone))


def _encode_time(value: time) -> Json:
    naive = value.replace(tzinfo=None, fold=0)
    return ["time", naive.isoformat(), value.fold, _encode_tzinfo(value.tzinfo)]


def _decode_time(node: list[Json]) -> time:
    text, fold = parse_items(node[:3], str, int)
    (zone,) = node[3:]
    return time.fromisoformat(text).replace(fold=fold, tzinfo=_decode_tzinfo(zone))


def _encode_fraction(value: Fraction) -> Json:
    return ["fraction", *_encode_divided("fraction", value.numerator, value.denominator)]


def _decode_fraction(node: list[Json]) -> Fraction:
    numerator, denominator = _decode_divided(node[1:])
    return Fraction(numerator, denominator)


def _encode_range(value: range) -> Json:
    return ["range", *_encode_divided("range", value.start, value.stop, value.step)]


def _decode_range(node: list[Json]) -> range:
    start, stop, step = _decode_divided(node[1:])
    return range(start, stop, step)


def _encode_divided(what: str, *numbers: int) -> list[Json]:
    if any(number.bit_length() > _MAX_DIVIDED_BITS for number in numbers):
        raise Unsupported(f"a {what} of more than {_MAX_DIVIDED_BITS} bits cannot be saved; save its integers")
    return [encode_int(number) for number in numbers]


def _decode_divided(nodes: list[Json]) -> list[int]:
    numbers = [decode_int(node) for node in nodes]
    if any(number.bit_length() > _MAX_DIVIDED_BITS for number in numbers):
        raise ValueError("it has too many digits")
    return numbers


def _encode_decimal(value: Decimal) -> Json:
    # Not str(value): that depends on the caller's decimal context.
    sign, digits, exponent = value.as_tuple()
    number = "".join(map(str, digits))
    words = {"F": "Infinity", "n": f"NaN{number}", "N": f"sNaN{number}"}
    text = words[exponent] if isinstance(exponent, str) else f"{number}E{exponent}"
    return ["decimal", "-" * sign + text]


def _decode_decimal(node: list[Json]) -> Decimal:
    (text,) = parse_items(node, str)
    if not _DECIMAL.fullmatch(text):
        raise ValueError("not a decimal number")
    return Decimal(text)


def _decode_complex(node: list[Json]) -> complex:
    real, imaginary = map(decode_float, node[1:])
    return complex(real, imaginary)


ENCODERS: Final[Mapping[type, Encoder]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: encode_int,
    float: encode_float,
    str: encode_text,
    complex: lambda value: ["complex", encode_float(value.real), encode_float(value.imag)],
    bytes: lambda value: ["bytes", encode_base64(value)],
    bytearray: lambda value: ["bytearray", encode_base64(value)],
    range: _encode_range,
    **dict.fromkeys((PosixPath, PurePosixPath, WindowsPath, PureWindowsPath), _encode_path),
    date: lambda value: ["date", value.isoformat()],
    datetime: _encode_datetime,
    time: _encode_time,
    timedelta: _encode_timedelta,
    timezone: _encode_timezone,
    Fraction: _encode_fraction,
    Decimal: _encode_decimal,
}
DECODERS: Final[Mapping[str, Decoder]] = {
    "int": decode_int,
    "float": decode_float,
    "str": decode_text,
    "complex": _decode_complex,
    "bytes": lambda node: decode_base64(parse_items(node, str)[0]),
    "bytearray": lambda node: bytearray(decode_base64(parse_items(node, str)[0])),
    "range": _decode_range,
    "path": _decode_path,
    "date": lambda node: date.fromisoformat(parse_items(node, str)[0]),
    "datetime": _decode_datetime,
    "time": _decode_time,
    "timedelta": lambda node: timedelta(*parse_items(node, int, int, int)),
    "timezone": _decode_timezone,
    "fraction": _decode_fraction,
    "decimal": _decode_decimal,
}


def decode_checked(node: list[Json], decode: Decoder, encoders: Mapping[type, Encoder]) -> object:
    """Decode a node; raises ValueError or ArithmeticError unless it is the canonical form of its value."""
    value = decode(node)
    # A path of the other operating system was decoded as a pure path, which encodes differently.
    if node[0] != "path" and encoders[type(value)](value) != node:
        raise ValueError("not the canonical form of its value")
    return value
