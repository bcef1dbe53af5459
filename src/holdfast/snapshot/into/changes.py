"""Finds which parts of a target differ from a snapshot: what is known of its memory decides, or a hash of it."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import torch

from holdfast.digest import Digest, hash_bytes
from holdfast.repo.engine import Engine
from holdfast.repo.format.boxes import Box, is_span, overlap, relative, slices, span_of, whole
from holdfast.repo.format.entry import ChunkTable, Entry
from holdfast.repo.read.read_plan import Region
from holdfast.repo.read.reader import SnapshotReader
from holdfast.snapshot.into.held import NOTED_BYTES, HeldContent, HeldMemory, Since
from holdfast.snapshot.into.in_place import list_memory
from holdfast.snapshot.into.plan import IntoPlan
from holdfast.snapshot.into.swap import Swap, SwapPair, find_shortage, refuse_memory
from holdfast.snapshot.load.batches import view_tensor_memory
from holdfast.snapshot.load.entries import drop_tied
from holdfast.tensors.device_digest.digests import digest_pieces
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece
from holdfast.tensors.dtypes import items_per_byte
from holdfast.tensors.memory import view_raw
from holdfast.tensors.storage import tensor_bytes

_log = logging.getLogger(__name__)

_HASHED_HERE_BYTES: Final = 64 << 10
"""Smaller pieces of memory are hashed by the caller: a thread takes longer to begin."""


class Cell(NamedTuple):
    """Memory of a target that one chunk fills, or a part of it."""

    row: int
    """The position of the chunk among those of its entry."""
    memory: torch.Tensor
    """A view of the target: bytes, or a box of raw items."""
    region: Region
    """The same part of the entry: a range of bytes, or a box."""
    rows: range
    """The chunks that are needed to fill it."""
    is_whole: bool
    """It is the whole chunk and nothing else, so its digest can be compared."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Memory of the target that is filled from one entry: a tensor, or a rank's box of one."""

    number: int
    tensor: torch.Tensor
    size_bytes: int
    box: Box | None


class Patch(NamedTuple):
    """A part of the target that differs from the snapshot, and new memory for it."""

    number: int
    tensor: torch.Tensor
    """The tensor of the target whose memory it is."""
    entry: Entry
    """With the chunks that are needed, and no others."""
    region: Region
    memory: torch.Tensor
    """A view of the target."""


class Changes:
    """The parts of a target that differ from a snapshot, read into new memory, and the swap that puts them in place."""

    def __init__(self, reader: SnapshotReader, patches: Sequence[Patch]) -> None:
        """Allocate the new memory; raises OutOfMemory if there is not enough."""
        self._reader = reader
        self._patches = patches
        self.size_bytes = sum(patch.region.size_bytes for patch in patches)
        self.numbers = {patch.number for patch in patches}
        """The entries that some part of the target differs from."""
        if shortage := find_shortage(self.size_bytes):
            raise self._refuse(shortage)
        try:
            # On the CPU, whatever the target's device: there it is read, verified and kept until the load is final.
            self._new = [torch.empty(each.memory.shape, dtype=each.memory.dtype) for each in patches]
        except (RuntimeError, MemoryError) as error:
            raise self._refuse(str(error).partition("\n")[0]) from error
        pairs: list[SwapPair] = [(patch.memory, new) for patch, new in zip(patches, self._new, strict=True)]
        self.swap = Swap(pairs, list({id(patch.tensor): patch.tensor for patch in patches}.values()))

    def _refuse(self, reason: str) -> Exception:
        return refuse_memory(self.size_bytes, reason, option="since=", of="what changes")

    def read(self) -> None:
        """Read and verify the new bytes; the target is not changed."""
        wanted = [
            (patch.entry, patch.region, tensor_bytes(new, new.nbytes))
            for patch, new in zip(self._patches, self._new, strict=True)
        ]
        self._reader.read_regions(wanted)


def find_changes(plan: IntoPlan, since: Since) -> Changes:
    """Return what of the plan's targets differs from the snapshot; memory whose content is not known is hashed."""
    held = plan.options.held
    finder = _Finder(plan, HeldMemory() if held is None or since.check else held)
    changes = Changes(plan.opened.reader, finder.find_patches())
    total = sum(part.size_bytes for part in _iter_parts(plan))
    text = "%r into a tree that holds %r: %d of %d bytes are read, %d bytes of the tree were hashed"
    _log.info(text, plan.opened.name, since.name, changes.size_bytes, total, finder.hashed_bytes)
    return changes


def iter_contents(plan: IntoPlan) -> Iterator[tuple[torch.Tensor, int, HeldContent]]:
    """Yield what the memory of a target holds after the plan was carried out, for `HeldMemory.note`.

    Memory that a step may write to is left out: code of the user may have changed it after it was filled.
    """
    tensors = (tensor for step in plan.steps for each in step.memory for tensor in list_memory(each))
    changed = {tensor.untyped_storage()._cdata for tensor in tensors}
    for part in _iter_parts(plan, NOTED_BYTES):
        if part.tensor.untyped_storage()._cdata not in changed:
            table = plan.opened.reader.manifest.find_chunks(part.number)
            yield part.tensor, part.size_bytes, HeldContent(table, part.box)


def _iter_parts(plan: IntoPlan, min_bytes: int = 1) -> Iterator[_Part]:
    """Yield the memory of the target, tied tensors once."""
    targets = [plan.in_place[number] for number in plan.names]
    for target in drop_tied([each for each in targets if each.pieces is None and each.size_bytes >= min_bytes]):
        yield _Part(target.ref.number, target.tensor, target.size_bytes, None)
    for target in targets:
        for box, tensor in target.pieces or ():
            if tensor.nbytes >= min_bytes:
                yield _Part(target.ref.number, tensor, tensor.nbytes, box)


class _Finder:
    """Finds the parts of a target that differ from the snapshot."""

    def __init__(self, plan: IntoPlan, held: HeldMemory) -> None:
        self._plan = plan
        self._held = held
        self._manifest = plan.opened.reader.manifest
        self.hashed_bytes = 0

    def find_patches(self) -> list[Patch]:
        patches: list[Patch] = []
        unknown: list[_Cells] = []
        for part in _iter_parts(self._plan):
            cells = _Cells(part, self._manifest.find_chunks(part.number), self._find_geometry(part))
            rows = self._find_changed(part, cells.table)
            if rows is None:
                unknown.append(cells)
            else:
                patches += self._make_patches(cells, rows)
        self.hashed_bytes = sum(cells.part.size_bytes for cells in unknown)
        on_host = [cells for cells in unknown if cells.part.tensor.is_cpu]
        with Engine("holdfast-compare", budget_bytes=self._plan.opened.reader.budget_bytes, waits=False) as engine:
            for cells in on_host:
                patches += self._make_patches(cells, _hash_rows(engine, cells))
        elsewhere = [cells for cells in unknown if not cells.part.tensor.is_cpu]
        for cells, rows in zip(elsewhere, _hash_rows_on_devices(elsewhere), strict=True):
            patches += self._make_patches(cells, rows)
        return patches

    def _find_changed(self, part: _Part, table: ChunkTable) -> Sequence[int] | None:
        """Return the chunks that differ from what the memory is known to hold; None if that is unknown."""
        content = self._held.find(part.tensor, part.size_bytes)
        return table.find_changed(content.table) if content is not None and content.box == part.box else None

    def _find_geometry(self, part: _Part) -> _Geometry:
        spec, entry_bytes, _ = self._manifest.find_facts(part.number)
        name = self._manifest.names[part.number]
        shape = () if part.box is None else self._plan.specs.decode(spec, size_bytes=entry_bytes, name=name).shape
        return _Geometry(tuple(part.tensor.shape) if part.box is None else shape, entry_bytes)

    def _make_patches(self, cells: _Cells, rows: Sequence[int]) -> Iterator[Patch]:
        part = cells.part
        for cell in cells.iter_joined(rows):
            entry = self._manifest.cut_entry(part.number, {row: cells.places[row] for row in cell.rows})
            yield Patch(part.number, part.tensor, entry, cell.region, cell.memory)


def _hash_rows(engine: Engine, cells: _Cells) -> list[int]:
    """Return the chunks that memory does not hold, by its own digest, or of which it has only a part."""
    every = list(cells.iter_cells(range(len(cells.table.sizes))))

    def differs(cell: Cell) -> bool:
        return not cell.is_whole or hash_memory(cell.memory) != cells.table.find_digest(cell.row)

    is_small = cells.part.size_bytes < _HASHED_HERE_BYTES
    items = ((cell, cell.region.size_bytes) for cell in every)
    found = map(differs, every) if is_small else engine.iter_results(differs, items)
    return [cell.row for cell, is_changed in zip(every, found, strict=True) if is_changed]


def _hash_rows_on_devices(elsewhere: Sequence[_Cells]) -> list[list[int]]:
    """Return the same for memory of other devices, which is hashed there, all of it at once."""
    cells = [list(each.iter_cells(range(len(each.table.sizes)))) for each in elsewhere]
    data = [DeviceBytes.from_tensor(cell.memory) for some in cells for cell in some if cell.is_whole]
    digests = iter(digest_pieces([DevicePiece(each, 0, each.size_bytes) for each in data]))

    def differs(cell: Cell, table: ChunkTable) -> bool:
        return not cell.is_whole or next(digests) != table.find_digest(cell.row)

    return [
        [cell.row for cell in some if differs(cell, each.table)] for some, each in zip(cells, elsewhere, strict=True)
    ]


def hash_memory(memory: torch.Tensor) -> Digest:
    """Return the digest of memory of the host, in C order."""
    # Referenced until its bytes are hashed: if the memory has gaps, it is a copy that nothing else keeps alive.
    contiguous = memory.contiguous()
    return hash_bytes(tensor_bytes(contiguous, contiguous.nbytes))


class _Geometry(NamedTuple):
    shape: tuple[int, ...]
    """Of the whole tensor."""
    entry_bytes: int


class _Cells:
    """The memory of one part of a target, cut as the chunks of its entry are."""

    def __init__(self, part: _Part, table: ChunkTable, geometry: _Geometry) -> None:
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
