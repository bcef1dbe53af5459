"""Texts of values for people: a repr in which digests are hex digits and sizes have units."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Final

from holdfast.digest import DIGEST_BYTES, short_hex
from holdfast.texts import format_bytes, shorten

_MAX_ITEMS: Final = 3
_MAX_CHARS: Final = 120


def readable_repr(value: Any) -> str:
    """Return the repr of a dataclass: digests in hex, sizes and times with units, without defaults and private fields.

    A class uses it as its `__repr__`.
    """
    shown = [field for field in dataclasses.fields(value) if field.repr and not field.name.startswith("_")]
    texts = [
        f"{field.name}={_format_field(field.name, getattr(value, field.name))}"
        for field in shown
        if not _is_default(field, getattr(value, field.name))
    ]
    return f"{type(value).__name__}({', '.join(texts)})"


def format_when(time_s: float) -> str:
    """Return a time in UTC; a number that is not a date as it is."""
    try:
        return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"@{time_s:g}"


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def _format_field(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, int | float) and name in ("time_s", "started_s"):
        return format_when(value)
    if isinstance(value, float) and (name == "seconds" or name.endswith("_s")):
        return f"{value:.3g} s"
    return _format_value(value)


def _format_value(value: object) -> str:
    if isinstance(value, bytes) and len(value) == DIGEST_BYTES:
        return short_hex(value)
    if isinstance(value, Mapping):
        return _enclose("{}", [f"{key!r}: {_format_value(each)}" for key, each in value.items()])
    if isinstance(value, list):
        return _enclose("[]", [_format_value(each) for each in value[: _MAX_ITEMS + 1]], len(value))
    if type(value) is tuple:
        return _enclose("()", [_format_value(each) for each in value[: _MAX_ITEMS + 1]], len(value))
    return shorten(repr(value), _MAX_CHARS)


def _enclose(brackets: str, texts: list[str], total: int | None = None) -> str:
    """Return the first items in brackets, and how many are left out."""
    left_out = (len(texts) if total is None else total) - _MAX_ITEMS
    shown = texts[:_MAX_ITEMS] + ([f"... {left_out} more"] if left_out > 0 else [])
    comma = "," if brackets == "()" and len(shown) == 1 else ""
    return brackets[0] + ", ".join(shown) + comma + brackets[1]
