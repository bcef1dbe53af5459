"""Finds where the tensors of a safetensors file are, by its header; reads no tensor and needs no library."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import BinaryIO, Final

from holdfast.errors import Corrupt
from holdfast.json_text import Json, iter_fields
from holdfast.repo.format.grid import ITEM_BYTES, Extent

MAX_HEADER_BYTES: Final = 4 << 20
"""A longer header is not read. 4 MiB describe about 30,000 tensors."""
LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
_MAX_DIMS: Final = 64
_MAX_BRACKETS: Final = 100_000
"""How many brackets a header may contain besides the three of each tensor: many nested lists take long to parse."""


def read_safetensors(file: BinaryIO, size_bytes: int) -> list[Extent]:
    """Return the tensors of a file that has `size_bytes`; none unless its whole header is consistent."""
    file.seek(0)
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    first = LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or first > size_bytes:
        return []
    header = file.read(length)
    if header.count(b"[") + header.count(b"{") > 3 * header.count(b'"data_offsets"') + _MAX_BRACKETS:
        return []
    try:
        fields = iter_fields(header, where="the header")
        found = [_parse_tensor(value, first, size_bytes) for name, value in fields if name != _METADATA]
    except (Corrupt, ValueError):
        return []
    extents = sorted(extent for extent in found if extent.stop > extent.start)
    return [] if any(left.stop > right.start for left, right in pairwise(extents)) else extents


def _parse_tensor(value: Json, first: int, size_bytes: int) -> Extent:
    """Return the extent of one tensor; raises ValueError if it is not inside the file or its shape does not fit."""
    if not isinstance(value, dict):
        raise ValueError("a tensor is not an object")
    start, stop = _parse_numbers(value.get("data_offsets"), limit=2)
    shape = _parse_numbers(value.get("shape"), limit=_MAX_DIMS)
    if not start <= stop <= size_bytes - first:
        raise ValueError("a tensor is not inside the file")
    return Extent(first + start, first + stop, *_find_items(stop - start, shape))


def _parse_numbers(value: Json, *, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > limit or not all(type(each) is int and each >= 0 for each in value):
        raise ValueError("not a short list of natural numbers")
    return tuple(value)


def _find_items(size_bytes: int, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of an item, and the shape; items of less than a byte are counted in bytes of a row.

    The size tells how large an item is, so no dtype has to be known.
    """
    item_bytes, rest = divmod(size_bytes, math.prod(shape) or 1)
    if rest == 0 and item_bytes in ITEM_BYTES:
        return item_bytes, shape
    outer = math.prod(shape[:-1]) or 1
    if size_bytes % outer or (size_bytes and 0 in shape) or size_bytes > math.prod(shape):
        raise ValueError("a shape does not fit the number of bytes")
    return 1, (*shape[:-1], size_bytes // outer)
