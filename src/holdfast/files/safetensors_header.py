"""Finds where the tensors of a safetensors file are, by its header; reads no tensor and needs no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from holdfast.errors import BadFile, Corrupt
from holdfast.json_text import Json, iter_fields
from holdfast.repo.format.grid import ITEM_BYTES, Extent

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_HEADER_BYTES: Final = 4 << 20
"""A file with a longer header is cut without regard to its tensors. 4 MiB describe about 30,000 tensors."""
LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
_MAX_DIMS: Final = 64
_MAX_BRACKETS: Final = 100_000
"""How many brackets a header may contain besides the three of each tensor: many nested lists take long to parse."""


class TensorSlot(NamedTuple):
    """One tensor of a safetensors file; its bytes are from `start` to `stop` in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsHeader(NamedTuple):
    """The header of a safetensors file: the tensors cover its data exactly once."""

    slots: tuple[TensorSlot, ...]
    metadata: Mapping[str, str]


def read_header(
    read: Callable[[int, int], Buffer], size_bytes: int, *, where: str, max_header_bytes: int
) -> SafetensorsHeader:
    """Read and check a header by `read(start, stop)`; raises BadFile with what is wrong. Dtypes may be unknown."""
    if size_bytes < LENGTH_BYTES:
        raise BadFile(f"{where} is no safetensors file: it has only {size_bytes} bytes", path=where)
    length = int.from_bytes(bytes(read(0, LENGTH_BYTES)), "little")
    first = LENGTH_BYTES + length
    if length > max_header_bytes or first > size_bytes:
        raise BadFile(f"{where} is cut off or no safetensors file: its header would end at byte {first}", path=where)
    header = bytes(read(LENGTH_BYTES, first))
    if header.count(b"[") + header.count(b"{") > 3 * header.count(b'"data_offsets"') + _MAX_BRACKETS:
        raise BadFile(f"{where} is no safetensors file: its header has too many lists", path=where)
    slots: dict[str, TensorSlot] = {}
    metadata: Json = {}
    try:
        for name, value in iter_fields(header, where="its header"):
            if name in slots or (name == _METADATA and metadata):
                raise BadFile(f"{where} has {name[:80]!r} twice in its header", path=where)
            if name == _METADATA:
                metadata = _verify_metadata(value, where)
            else:
                slots[name] = _parse_slot(name, value, (first, size_bytes), where)
    except Corrupt as error:
        raise BadFile(f"{where} is damaged: {error}", path=where) from error
    _verify_cover(slots.values(), (first, size_bytes), where)
    return SafetensorsHeader(tuple(slots.values()), metadata)


def _parse_slot(name: str, value: Json, data: tuple[int, int], where: str) -> TensorSlot:
    what, (first, end) = f"{where}: tensor {name[:80]!r}", data
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"{what} has a malformed header", path=where)
    shape, offsets = _parse_sizes(value["shape"]), _parse_sizes(value["data_offsets"])
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > _MAX_DIMS:
        raise BadFile(f"{what} has a malformed shape or offset", path=where)
    start, stop = offsets
    if not start <= stop <= end - first:
        raise BadFile(
            f"{what} ends at byte {stop} of {end - first}: the file is cut off or damaged; fetch it again", path=where
        )
    return TensorSlot(name, str(value["dtype"]), shape, first + start, first + stop)


def _parse_sizes(value: Json) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 1 << 60 for each in value):
        return None
    return tuple(value)


def _verify_metadata(value: Json, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise BadFile(f"{where} has malformed metadata: it must be texts by name", path=where)
    return value


def _verify_cover(slots: Iterable[TensorSlot], data: tuple[int, int], where: str) -> None:
    """Raise BadFile if tensors overlap, or bytes belong to none: the safetensors library refuses both."""
    at, end = data
    for slot in sorted(slots, key=lambda slot: (slot.start, slot.stop)):
        if slot.start != at:
            raise BadFile(f"{where}: tensor {slot.name[:80]!r} overlaps another one, or follows a gap", path=where)
        at = slot.stop
    if at != end:
        raise BadFile(f"{where} has {end - at} bytes after its last tensor", path=where)


def read_safetensors(file: BinaryIO, size_bytes: int) -> list[Extent]:
    """Return the tensors of a file that has `size_bytes`; none unless its whole header is consistent."""

    def read(start: int, stop: int) -> bytes:
        file.seek(start)
        return file.read(stop - start)

    try:
        header = read_header(read, size_bytes, where="the file", max_header_bytes=MAX_HEADER_BYTES)
        found = [
            Extent(each.start, each.stop, *_find_items(each.stop - each.start, each.shape)) for each in header.slots
        ]
    except ValueError:  # BadFile is one
        return []
    return sorted(extent for extent in found if extent.stop > extent.start)


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
