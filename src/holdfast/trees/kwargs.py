"""Flattens the arguments of a call into one tuple of values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.errors import Mismatch


def pack_kwargs(*args: object, **kwargs: object) -> tuple[tuple[object, ...], tuple[str, ...]]:
    """Return all values, keyword arguments last, and the keywords."""
    return (*args, *kwargs.values()), tuple(kwargs)


def unpack_kwargs(flat: Sequence[Any], keys: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that were passed to `pack_kwargs`."""
    if len(keys) > len(flat):
        raise Mismatch(
            f"{len(keys)} keywords for {len(flat)} values: pass both results of pack_kwargs, unchanged",
            problems=tuple(f"no value for keyword {key!r}" for key in keys[: len(keys) - len(flat)]),
        )
    num_args = len(flat) - len(keys)
    kwargs = dict(zip(keys, flat[num_args:], strict=True))
    if len(kwargs) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise Mismatch(
            f"keyword {twice[0]!r} occurs twice: pass both results of pack_kwargs, unchanged",
            problems=tuple(f"keyword {key!r} occurs twice" for key in twice),
        )
    return tuple(flat[:num_args]), kwargs
