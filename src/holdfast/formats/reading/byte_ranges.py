"""Where the bytes of a storage are: in one range of a file, in several, or in boxes; read in pieces, never mapped."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.errors import BadFile
from holdfast.repo.files import FileSource, SourceFolder, plan_files
from holdfast.repo.format.boxes import Box, Coordinates, contains, cut_rows, overlap, relative, slices, volume, whole

SPAN_BYTES: Final = 32 << 20
"""The largest piece of a file that is in memory to gather items which are not next to each other."""
_RAW: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}
Items = npt.NDArray[Any]


class ByteReader(Protocol):
    """The bytes of one storage. `read` may be called from any thread, and repeatedly."""

    @property
    def file(self) -> str:
        """The file that contains the first byte, relative to the source."""

    @property
    def size_bytes(self) -> int:
        """The number of bytes."""

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop` in new memory; raises SourceChanged if the file has changed."""


@dataclass(frozen=True, slots=True)
class FileBytes:
    """One range of a file."""

    file: str
    source: FileSource
    offset: int
    size_bytes: int

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`."""
        return self.source.read(self.offset + start, self.offset + stop)

    def narrow(self, start: int, stop: int) -> FileBytes:
        """Return the range from `start` to `stop` of this range; the caller has checked both."""
        return FileBytes(self.file, self.source, self.offset + start, stop - start)


@dataclass(frozen=True, slots=True)
class JoinedBytes:
    """Several ranges, one after the other."""

    parts: Sequence[ByteReader]
    ends: Sequence[int]

    @property
    def file(self) -> str:
        """The file of the first part."""
        return self.parts[0].file if self.parts else ""

    @property
    def size_bytes(self) -> int:
        """The size of all parts."""
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`, of one part or of several."""
        found = []
        number = bisect_right(self.ends, start)
        while start < stop:
            end = min(stop, self.ends[number])
            begin = self.ends[number - 1] if number else 0
            found.append(self.parts[number].read(start - begin, end - begin))
            start, number = end, number + 1
        return found[0] if len(found) == 1 else memoryview(bytearray().join(found))


def join_bytes(parts: Sequence[ByteReader]) -> ByteReader:
    """Return one reader for several ranges, one after the other."""
    return parts[0] if len(parts) == 1 else JoinedBytes(parts, list(accumulate(part.size_bytes for part in parts)))


class Geometry(NamedTuple):
    """Strided items in a storage."""

    item_bytes: int
    shape: Coordinates
    stride: Coordinates
    """In items, as in torch."""
    offset: int = 0
    """In items."""

    def find_span(self, box: Box) -> tuple[int, int]:
        """Return the first item of a box in the storage, and how many items it spans; the box is not empty."""
        first = self.offset + sum(start * step for start, step in zip(box.starts, self.stride, strict=True))
        return first, 1 + sum((size - 1) * step for size, step in zip(box.sizes, self.stride, strict=True))


def gather(reader: ByteReader, geometry: Geometry, box: Box) -> Items:
    """Return the items of a box in C order; reads at most SPAN_BYTES at a time."""
    out: Items = np.empty(box.sizes, _RAW[geometry.item_bytes])
    if volume(box):
        for part in _iter_parts(geometry, box):
            out[slices(relative(part, box.starts))] = _read_part(reader, geometry, part)
    return out


def _iter_parts(geometry: Geometry, box: Box) -> Iterator[Box]:
    """Yield boxes that make up `box`, each of which spans few bytes; splits the dim that is spread widest."""
    waiting = [box]
    while waiting:
        part = waiting.pop()
        dims = [dim for dim, size in enumerate(part.sizes) if size > 1]
        if not dims or geometry.find_span(part)[1] * geometry.item_bytes <= SPAN_BYTES:
            yield part
            continue
        widest = max(dims, key=lambda dim: geometry.stride[dim] * (part.sizes[dim] - 1))
        waiting += _halve(part, widest)


def _halve(box: Box, dim: int) -> tuple[Box, Box]:
    half = box.sizes[dim] // 2
    low, high = list(box.sizes), list(box.sizes)
    low[dim], high[dim] = half, box.sizes[dim] - half
    starts = list(box.starts)
    starts[dim] += half
    return Box(box.starts, tuple(low)), Box(tuple(starts), tuple(high))


def _read_part(reader: ByteReader, geometry: Geometry, part: Box) -> Items:
    item_bytes = geometry.item_bytes
    first, items = geometry.find_span(part)
    data = reader.read(first * item_bytes, (first + items) * item_bytes)
    raw: Items = np.frombuffer(data, _RAW[item_bytes])
    strides = tuple(step * item_bytes for step in geometry.stride)
    return np.lib.stride_tricks.as_strided(raw, part.sizes, strides)


def iter_gathered(reader: ByteReader, geometry: Geometry) -> Iterator[memoryview]:
    """Yield all items in C order, in pieces of bounded size."""
    waiting = [whole(geometry.shape)]
    while waiting:
        box = waiting.pop()
        dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
        if volume(box) * geometry.item_bytes > SPAN_BYTES and dim is not None:
            waiting += reversed(_halve(box, dim))
        elif volume(box):
            yield view_items(gather(reader, geometry, box))


def view_items(items: Items) -> memoryview:
    """Return items in C order as bytes."""
    return memoryview(np.ascontiguousarray(items).reshape(-1).view(np.uint8).data)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor, with its items in a storage."""

    box: Box
    reader: ByteReader
    geometry: Geometry
    """Of the box: its shape is the size of the box."""


@dataclass(frozen=True, slots=True)
class BoxBytes:
    """A global tensor in C order, assembled from boxes that cover it exactly once."""

    shape: Coordinates
    item_bytes: int
    pieces: Sequence[Piece]
    cells: Sequence[Box]
    """The chunks of the tensor, in C order: each read is one of them."""
    ends: Sequence[int]
    """In bytes: where each cell ends."""

    @property
    def file(self) -> str:
        """The file of the first piece."""
        return self.pieces[0].reader.file if self.pieces else ""

    @property
    def size_bytes(self) -> int:
        """The size of the global tensor."""
        return math.prod(self.shape) * self.item_bytes

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`, assembled cell by cell."""
        found = []
        number = bisect_right(self.ends, start)
        while start < stop:
            begin, end = (self.ends[number - 1] if number else 0), self.ends[number]
            data = view_items(self._assemble(self.cells[number]))
            found.append(data[start - begin : min(stop, end) - begin])
            start, number = min(stop, end), number + 1
        return found[0] if len(found) == 1 else memoryview(bytearray().join(found))

    def _assemble(self, cell: Box) -> Items:
        out: Items = np.empty(cell.sizes, _RAW[self.item_bytes])
        for piece in self.pieces:
            common = overlap(cell, piece.box) if cell.sizes else cell
            if common is not None:
                inside = relative(common, piece.box.starts)
                out[slices(relative(common, cell.starts))] = gather(piece.reader, piece.geometry, inside)
        return out


def assemble(shape: Coordinates, item_bytes: int, pieces: Sequence[Piece], *, what: str) -> ByteReader:
    """Return a reader for a global tensor; raises BadFile if the boxes do not cover it exactly once."""
    _verify_cover(shape, pieces, what)
    only = pieces[0] if len(pieces) == 1 else None
    if only and _is_plain(only.geometry):
        return only.reader
    cells = cut_rows(whole(shape), shape, item_bytes)
    return BoxBytes(shape, item_bytes, pieces, cells, list(accumulate(volume(cell) * item_bytes for cell in cells)))


def _is_plain(geometry: Geometry) -> bool:
    step = 1
    for size, found in zip(reversed(geometry.shape), reversed(geometry.stride), strict=True):
        if size > 1 and found != step:
            return False
        step *= max(size, 1)
    return geometry.offset == 0


def _verify_cover(shape: Coordinates, pieces: Sequence[Piece], what: str) -> None:
    boxes = sorted(piece.box for piece in pieces)
    everything = whole(shape)
    if not all(len(box.starts) == len(box.sizes) == len(shape) for box in boxes):
        raise BadFile(f"{what}: a shard has another number of dimensions than the tensor {shape}")
    outside = next((box for box in boxes if not contains(everything, box)), None)
    if outside is not None:
        raise BadFile(f"{what}: a shard {outside.starts} + {outside.sizes} is outside of the tensor {shape}")
    # Equal volume and no overlap: then nothing is missing. Sorted by start, so only neighbours in dim 0 can overlap.
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if shape and other.starts[0] >= box.stops[0]:
                break
            if not shape or overlap(box, other):
                raise BadFile(f"{what}: two shards cover the same items, from {other.starts}")
    if sum(map(volume, boxes)) != math.prod(shape):
        raise BadFile(f"{what}: shards are missing; they cover {sum(map(volume, boxes))} of {math.prod(shape)} items")


def open_file(path: str) -> FileBytes:
    """Return the bytes of a file that the user named; raises BadFile, BadName if it is not a regular file."""
    try:
        sources = plan_files([path])
    except FileNotFoundError as error:
        raise BadFile(f"{path} does not exist", path=path) from error
    if len(sources) != 1 or sources[0].path != path:
        raise BadFile(f"{path} is a directory, and a file is expected", path=path)
    return FileBytes(os.path.basename(path), sources[0], 0, sources[0].size_bytes)


def open_file_in(folder: SourceFolder, name: str) -> FileBytes:
    """Return the bytes of a file in a folder; raises BadFile, or BadName for a link that must not be followed."""
    try:
        source = folder.plan_file(name)
    except FileNotFoundError as error:
        path = folder.join(name)
        raise BadFile(f"{path} does not exist", path=path) from error
    return FileBytes(os.path.basename(name), source, 0, source.size_bytes)


@dataclass(frozen=True, slots=True)
class SlicedBytes:
    """A range of another reader."""

    inner: ByteReader
    offset: int
    size_bytes: int

    @property
    def file(self) -> str:
        """The file of the reader."""
        return self.inner.file

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`, counted from the offset."""
        return self.inner.read(self.offset + start, self.offset + stop)
