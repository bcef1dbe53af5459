"""Memory that is filled from an entry, cut as the chunks of the entry are, so that digests can be compared."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from holdfast.repo.format.boxes import Box, is_span, overlap, relative, slices, span_of, whole
from holdfast.repo.format.entry import ChunkTable
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.read.read_plan import Region
from holdfast.snapshot.load.batches import view_tensor_memory
from holdfast.tensors.device_digest.digests import digest_pieces
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece
from holdfast.tensors.dtypes import items_per_byte
from holdfast.tensors.memory import view_raw
from holdfast.tensors.spec import SpecDecoder


class Cell(NamedTuple):
    """Memory that one chunk fills, or a part of it."""

    row: int
    """The position of the chunk among those of its entry."""
    memory: torch.Tensor
    """A view of the part: bytes, or a box of raw items."""
    region: Region
    """The same part of the entry: a range of bytes, or a box."""
    rows: range
    """The chunks that are needed to fill it."""
    is_whole: bool
    """It is the whole chunk and nothing else, so its digest can be compared."""


@dataclass(frozen=True, slots=True)
class FilledPart:
    """Memory that is filled from one entry: a tensor, or a rank's box of one."""

    number: int
    tensor: torch.Tensor
    size_bytes: int
    box: Box | None


class EntryGeometry(NamedTuple):
    """The shape and the size of an entry."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    entry_bytes: int


class PartCells:
    """The memory of one part, cut as the chunks of its entry are."""

    def __init__(self, part: FilledPart, table: ChunkTable, geometry: EntryGeometry) -> None:
        self.part = part
        self.table = table
        self._shape, self._entry_bytes = geometry
        is_range = part.box is None or is_span(part.box, self._shape)
        self._is_range = table.dims < 2 and is_range and (part.box is None or part.tensor.is_contiguous())

    @cached_property
    def places(self) -> Sequence[tuple[int, ...]]:
        """The place of each chunk in the entry; found only if some of them have changed."""
        return self.table.find_places()

    def iter_joined(self, rows: Sequence[int]) -> Iterator[Cell]:
        """Yield the memory that these chunks fill, as few contiguous pieces if it is a range of bytes."""
        if not self._is_range or not rows:
            yield from self.iter_cells(rows)
            return
        first = 0
        for at in range(1, len(rows) + 1):
            if at == len(rows) or rows[at] != rows[at - 1] + 1:
                yield from self._iter_ranges([range(rows[first], rows[at - 1] + 1)])
                first = at

    def iter_cells(self, rows: Sequence[int]) -> Iterator[Cell]:
        """Yield the memory that each of these chunks fills."""
        if self._is_range:
            return self._iter_ranges(range(row, row + 1) for row in rows)
        return self._iter_boxes(rows)

    def _iter_ranges(self, groups: Iterable[range]) -> Iterator[Cell]:
        part, item_bytes = self.part, self.part.tensor.element_size()
        start, stop = (0, part.size_bytes) if part.box is None else span_of(part.box, self._shape, item_bytes)
        memory = view_tensor_memory(part.tensor, stop - start)
        for rows in groups:
            (begin, _), (last, size) = self.places[rows[0]], self.places[rows[-1]]
            low, high = max(begin, start), min(last + size, stop)
            if low < high:
                region = Region(Box((low,), (high - low,)), (self._entry_bytes,), 1)
                is_whole = high - low == last + size - begin
                yield Cell(rows[0], memory[low - start : high - start], region, rows, is_whole)

    def _iter_boxes(self, rows: Sequence[int]) -> Iterator[Cell]:
        part, shape, item_bytes = self.part, self._shape, self.part.tensor.element_size()
        box = whole(shape) if part.box is None else part.box
        if items_per_byte(part.tensor.dtype) > 1:
            # Items are smaller than a byte, so a box of it is no view: all of it is one cell.
            if rows:
                needed = range(len(self.places))
                yield Cell(rows[0], part.tensor, Region(box, shape, item_bytes), needed, is_whole=False)
            return
        raw = view_raw(part.tensor)
        for row in rows:
            chunk, needed = self._find_box(row)
            common = overlap(chunk, box)
            if common is not None:
                memory = raw[slices(relative(common, box.starts))]
                is_whole = self.table.dims > 1 and common == chunk
                yield Cell(row, memory, Region(common, shape, item_bytes), needed, is_whole)

    def _find_box(self, row: int) -> tuple[Box, range]:
        """Return the box that a chunk fills, and the chunks that contain it; of a range of bytes, all rows it meets."""
        place = self.places[row]
        if self.table.dims > 1:
            return Box(place[: self.table.dims], place[self.table.dims :]), range(row, row + 1)
        row_bytes = self._entry_bytes // self._shape[0]
        first, last = place[0] // row_bytes, -(-(place[0] + place[1]) // row_bytes)
        box = Box((first, *[0] * (len(self._shape) - 1)), (last - first, *self._shape[1:]))
        return box, range(*self._find_rows(first * row_bytes, last * row_bytes))

    def _find_rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first chunk that contains bytes from `start` on, and the first one from `stop` on."""
        begins = [begin for begin, _ in self.places]
        return max(0, bisect_right(begins, start) - 1), bisect_left(begins, stop)


def make_cells(part: FilledPart, manifest: Manifest, specs: SpecDecoder) -> PartCells:
    """Return the cells of a part of an entry in a manifest."""
    spec, entry_bytes, _ = manifest.find_facts(part.number)
    shape = tuple(part.tensor.shape)
    if part.box is not None:
        shape = specs.decode(spec, size_bytes=entry_bytes, name=manifest.names[part.number]).shape
    return PartCells(part, manifest.find_chunks(part.number), EntryGeometry(shape, entry_bytes))


def hash_on_devices(parts: Sequence[PartCells]) -> list[list[tuple[Cell, bool]]]:
    """Return the cells of each part, and whether the memory of a device holds its chunk; all is hashed at once.

    A cell that is only a part of its chunk has no digest: whether the memory holds it is not known, so False.
    """
    cells = [list(each.iter_cells(range(len(each.table.sizes)))) for each in parts]
    data = [DeviceBytes.from_tensor(cell.memory) for some in cells for cell in some if cell.is_whole]
    digests = iter(digest_pieces([DevicePiece(each, 0, each.size_bytes) for each in data]))

    def is_held(cell: Cell, table: ChunkTable) -> bool:
        return cell.is_whole and next(digests) == table.find_digest(cell.row)

    return [[(cell, is_held(cell, each.table)) for cell in some] for some, each in zip(cells, parts, strict=True)]
