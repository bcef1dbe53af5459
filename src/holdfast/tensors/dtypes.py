"""Dtypes by name and by size: the fixed table of those that this torch has; no name from a store is evaluated."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

import torch

from holdfast.errors import Corrupt, NewerFormat
from holdfast.json_text import Json

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ITEMS_PER_BYTE: Final = MappingProxyType({torch.quint4x2: 2, torch.quint2x4: 4})
# From str(dtype), not the attribute: some dtypes have several attributes (`float`, `bit`), but one name of their own.
_BY_NAME: Final = MappingProxyType(
    {str(found).removeprefix("torch."): found for found in vars(torch).values() if isinstance(found, torch.dtype)}
)
_NAMES: Final = MappingProxyType({found: name for name, found in _BY_NAME.items()})


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's own name of a dtype: "float32", never "float"."""
    return _NAMES[dtype]


def find_dtype(name: Json) -> torch.dtype:
    """Return the dtype with that name; raises NewerFormat if this torch does not have it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Corrupt(f"{str(name)[:80]!r} is not the name of a dtype: run holdfast check")
    found = _BY_NAME.get(name)
    if found is None:
        raise NewerFormat(f"torch {torch.__version__} has no dtype {name!r}: upgrade torch")
    return found


def item_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one item; 1 for dtypes that pack several values into a byte."""
    return dtype.itemsize


def number_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one number: of an item, or of the real part of a complex one."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def items_per_byte(dtype: torch.dtype) -> int:
    """Return how many items share one byte of storage: 1, except for two quantised dtypes.

    Tensors of these two are laid out as if contiguous, in `ceil(items / items_per_byte)` bytes. torch allocates more,
    rounding up for each row, but never writes the bytes after the last item.
    """
    return _ITEMS_PER_BYTE.get(dtype, 1)
