"""The items of stored tensors: where they lie in an entry, and whether two entries hold the same; needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

from holdfast.diff.facts import parse_shape
from holdfast.errors import Corrupt
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.record import Json
from holdfast.repo.read.reader import SnapshotReader

_LETTERS: Final[Mapping[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
_PACKED_DTYPES: Final = ("quint4x2", "quint2x4")
"""Several items in a byte: they are as good as bytes, for they always lie in C order."""
_MAX_REPEATS: Final = 64
"""Views in which each item stands more often than this are not worth the time; no real one does."""


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """Where the items of a tensor, an array or a mere span of bytes lie in its entry."""

    item_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In items."""
    offset: int = 0
    """In items."""
    flips: tuple[bool, ...] = ()
    """Of each number in an item, whether its sign is the opposite of what is stored."""

    @property
    def place(self) -> tuple[object, ...]:
        """The same for layouts that differ in nothing but the strides of dimensions that have one item."""
        dims = [(size, step) for size, step in zip(self.shape, self.stride, strict=True) if size != 1]
        return self.item_bytes, self.offset, self.flips, tuple(dims)


@dataclass(frozen=True, slots=True)
class ReadableEntry:
    """An entry that can be read, and what is in it."""

    reader: SnapshotReader
    entry: Entry
    layout: ItemLayout

    def read(self, start: int, stop: int) -> bytearray:
        """Read and verify the bytes from `start` to `stop`."""
        data = bytearray(stop - start)
        self.reader.read_into(self.entry, start, memoryview(data))
        return data


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of items that is small enough to be looked at in one go."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def span(self, layout: ItemLayout) -> tuple[int, int]:
        """Return the bytes of the entry that it reaches over."""
        first = layout.offset + sum(at * step for at, step in zip(self.start, layout.stride, strict=True))
        return first * layout.item_bytes, (first + find_span(self.shape, layout.stride)) * layout.item_bytes


def find_layout(entry: Entry) -> ItemLayout:
    """Return where the items of an entry lie; raises Corrupt if they would not fit in there."""
    spec = entry.spec if isinstance(entry.spec, dict) else {}
    kind, dtype = spec.get("type"), str(spec.get("dtype", ""))
    if kind == "tensor" and not spec.get("meta") and dtype not in _PACKED_DTYPES:
        layout = _find_tensor_layout(entry, spec, dtype)
    elif kind == "array":
        layout = _find_array_layout(entry, spec)
    else:
        layout = ItemLayout(1, (entry.size_bytes,), (1,))
    end = (layout.offset + find_span(layout.shape, layout.stride)) * layout.item_bytes
    if 0 not in layout.shape and end > entry.size_bytes:
        raise Corrupt(f"{entry.name}: it needs {end} bytes, its entry holds {entry.size_bytes}", key=entry.name)
    return layout


def _find_tensor_layout(entry: Entry, spec: dict[str, Json], dtype: str) -> ItemLayout:
    shape = parse_shape(spec.get("shape"), entry.name)
    stride = parse_shape(spec["stride"], entry.name) if "stride" in spec else find_stride(shape)
    (offset,) = parse_shape([spec.get("offset", 0)], entry.name)
    if len(stride) != len(shape):
        raise Corrupt(f"{entry.name} has strides that do not fit its shape", key=entry.name)
    if spec.get("packed"):
        dense = iter(find_stride([size for size, step in zip(shape, stride, strict=True) if step or size == 1]))
        stride = tuple(next(dense) if step or size == 1 else 0 for size, step in zip(shape, stride, strict=True))
    flips = (bool(spec.get("neg")), bool(spec.get("neg")) != bool(spec.get("conj")))
    return ItemLayout(count_item_bytes(dtype), shape, stride, offset, flips[: 2 if dtype.startswith("complex") else 1])


def _find_array_layout(entry: Entry, spec: dict[str, Json]) -> ItemLayout:
    shape = parse_shape(spec.get("shape"), entry.name)
    stride = find_stride(shape)
    if spec.get("order") == "F":
        stride = tuple(reversed(find_stride(shape[::-1])))
    return ItemLayout(entry.size_bytes // max(math.prod(shape), 1) or 1, shape, stride)


def count_item_bytes(dtype: str) -> int:
    """Return the bytes of one item by the name of its dtype, which has its bits in it."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0][:4]) // 8) if bits else 1


def find_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of items in C order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def find_span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many items lie between the first and the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_same(a: ReadableEntry, b: ReadableEntry, *, limit_bytes: int) -> bool:
    """Tell whether two entries hold the same items, bit for bit; reads only where digests cannot tell."""
    if (a.layout.shape, a.layout.item_bytes) != (b.layout.shape, b.layout.item_bytes):
        return False
    if 0 in a.layout.shape:
        return True
    if a.layout.place == b.layout.place:
        if list_chunks(a.entry) == list_chunks(b.entry):
            return True
        if _is_filled(a.layout, a.entry.size_bytes) and a.entry.size_bytes == b.entry.size_bytes:
            return _has_same_bytes(a, b, limit_bytes)
    if is_tangled(a, b):
        return False
    return all(_has_same_tile(a, b, tile) for tile in iter_tiles(a.layout, b.layout, limit_bytes=limit_bytes))


def is_tangled(a: ReadableEntry, b: ReadableEntry) -> bool:
    """Tell whether looking at every item would take far longer than the bytes are worth."""
    steps = zip(a.layout.shape, a.layout.stride, b.layout.stride, strict=True)
    items = math.prod(size for size, *both in steps if any(both))
    return items * a.layout.item_bytes > _MAX_REPEATS * (a.entry.size_bytes + b.entry.size_bytes)


def list_chunks(entry: Entry) -> list[tuple[bytes, int, tuple[int, ...]]]:
    """Return what the bytes of an entry are, and not where they are stored."""
    return [(chunk.digest, chunk.size_bytes, chunk.box) for chunk in entry.chunks]


def _is_filled(layout: ItemLayout, size_bytes: int) -> bool:
    """Tell whether every byte of the entry is an item's; what lies between the items of a view may be another's."""
    reach = 1
    for step, size in sorted(zip(layout.stride, layout.shape, strict=True)):
        if size > 1 and step > reach:
            return False
        reach += (size - 1) * step
    return layout.offset == 0 and reach * layout.item_bytes == size_bytes


def _has_same_bytes(a: ReadableEntry, b: ReadableEntry, limit_bytes: int) -> bool:
    """Compare chunks that begin and end at the same places by their digests, the bytes between them as they are."""
    if a.entry.dims or b.entry.dims:
        # Boxes: as long as they are the same, the digests decide; otherwise reading says what can be done.
        boxes = [[chunk.box for chunk in held.entry.chunks] for held in (a, b)]
        if boxes[0] == boxes[1]:
            return False
    ours, theirs = _place_chunks(a.entry), _place_chunks(b.entry)
    if any(digest != ours[place] for place, digest in theirs.items() if place in ours):
        return False
    # Cut the same way all along, they are equal, and would have been found to be so.
    rest = _merge(sorted(place for place in ours if place not in theirs))
    step = max(1, limit_bytes // 2)
    pieces = ((low, min(low + step, stop)) for start, stop in rest for low in range(start, stop, step))
    return all(a.read(*piece) == b.read(*piece) for piece in pieces)


def _place_chunks(entry: Entry) -> dict[tuple[int, int], bytes]:
    found, end = {}, 0
    for chunk in entry.chunks:
        found[end, end + chunk.size_bytes] = bytes(chunk.digest)
        end += chunk.size_bytes
    return found


def _merge(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that follow each other."""
    merged: list[tuple[int, int]] = []
    for start, stop in places:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def iter_tiles(a: ItemLayout, b: ItemLayout, *, limit_bytes: int, limit_items: int = 1 << 62) -> Iterator[Tile]:
    """Yield boxes that are all of the items, each within the limits in both entries together.

    A dimension in which every item is the same one on both sides is as good as one item.
    """
    steps = list(zip(a.stride, b.stride, strict=True))
    shape = tuple(size if any(both) else min(size, 1) for size, both in zip(a.shape, steps, strict=True))
    limit_span = max(1, limit_bytes // (a.item_bytes + b.item_bytes))
    waiting = [Tile((0,) * len(shape), shape)] if 0 not in shape else []
    while waiting:
        tile = waiting.pop()
        spans = [find_span(tile.shape, layout.stride) for layout in (a, b)]
        if max(spans) <= limit_span and math.prod(tile.shape) <= limit_items:
            yield tile
            continue
        side = 1 if spans[1] > max(spans[0], limit_span) else 0
        dim = max(range(len(shape)), key=lambda at: ((tile.shape[at] - 1) * steps[at][side], tile.shape[at]))
        waiting += _halve(tile, dim)


def _halve(tile: Tile, dim: int) -> list[Tile]:
    """Return the halves, the second one first: they go on a stack."""
    low = (tile.shape[dim] + 1) // 2
    start = [*tile.start[:dim], tile.start[dim] + low, *tile.start[dim + 1 :]]
    sizes = [(*tile.shape[:dim], size, *tile.shape[dim + 1 :]) for size in (tile.shape[dim] - low, low)]
    return [Tile(tuple(start), sizes[0]), Tile(tile.start, sizes[1])]


def _has_same_tile(a: ReadableEntry, b: ReadableEntry, tile: Tile) -> bool:
    """Compare items one by one, but for a loop over one dimension that slices do."""
    flips = [first != second for first, second in zip(a.layout.flips, b.layout.flips, strict=True)]
    # Where signs differ, the numbers of the item; elsewhere the largest ones of a memoryview that it is made of.
    whole = a.layout.item_bytes // len(flips) if any(flips) else a.layout.item_bytes
    unit = next(size for size in (8, 4, 2, 1) if whole % size == 0)
    planes = a.layout.item_bytes // unit
    ours, theirs = (memoryview(held.read(*tile.span(held.layout))).cast(_LETTERS[unit]) for held in (a, b))
    dims = _merge_dims(tile, a.layout, b.layout)
    long = max((dim for dim in dims if dim[1] and dim[2]), default=(1, 1, 1))
    others = [dim for dim in dims if dim is not long]
    size, x_step, y_step = long[0], long[1] * planes, long[2] * planes
    for plane in range(planes):
        for index in product(*(range(dim[0]) for dim in others)):
            x = plane + planes * sum(at * dim[1] for at, dim in zip(index, others, strict=True))
            y = plane + planes * sum(at * dim[2] for at, dim in zip(index, others, strict=True))
            found = ours[x : x + (size - 1) * x_step + 1 : x_step].tobytes()
            if any(flips) and flips[plane]:
                found = _flip(found, unit)
            if found != theirs[y : y + (size - 1) * y_step + 1 : y_step].tobytes():
                return False
    return True


def _merge_dims(tile: Tile, a: ItemLayout, b: ItemLayout) -> list[tuple[int, int, int]]:
    """Return (size, stride, stride) of the dimensions, as few and as long ones as possible."""
    merged: list[tuple[int, int, int]] = []
    for size, x, y in zip(tile.shape, a.stride, b.stride, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * x, size * y):
            merged[-1] = (merged[-1][0] * size, x, y)
        else:
            merged.append((size, x, y))
    return merged


def _flip(numbers: bytes, size_bytes: int) -> bytes:
    """Return little-endian floats with their signs flipped."""
    mask = (bytes(size_bytes - 1) + b"\x80") * (len(numbers) // size_bytes)
    return (int.from_bytes(numbers, "little") ^ int.from_bytes(mask, "little")).to_bytes(len(numbers), "little")
