"""Options of a load, the batches in which it reads, and memory that is filled from an entry chunk by chunk."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeVar

import torch

from holdfast.progress import Progress
from holdfast.repo.format.boxes import Box, is_span, overlap, relative, slices, span_of, whole
from holdfast.repo.format.entry import ChunkTable, Entry
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.read.read_plan import Region
from holdfast.repo.read.reader import SnapshotReader, Verify, WriteObserver, verify_mode
from holdfast.tensors.build import CPU
from holdfast.tensors.device_digest.choice import digest_pieces
from holdfast.tensors.device_digest.pieces import DeviceBytes, DevicePiece
from holdfast.tensors.memory import new_memory, view_bytes, view_raw, view_storage
from holdfast.tensors.spec import SpecDecoder, TensorSpec, items_per_byte

Item = TypeVar("Item")
_READ_AT_ONCE: Final = 1024
"""How many small tensors are read at a time; each has an entry, a chunk and a buffer in memory."""
_SMALL_BYTES: Final = 8 << 10
"""A small tensor has about so many bytes, where more of them are read at a time because each batch waits once."""

EntriesOfSpec = tuple[TensorSpec, list[int]]
"""A spec, and the numbers of entries that have it."""


def view_tensor_memory(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """Return the memory of a tensor on any device, from its first item on, as a tensor of bytes."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return view_storage(tensor.untyped_storage(), start, start + size_bytes)


def read_to_devices(reader: SnapshotReader, wanted: Sequence[tuple[Entry, torch.Tensor]], watch: WriteObserver) -> None:
    """Fill memory on other devices, given as tensors of bytes; uses at most half of the budget on the host."""
    limit = reader.budget_bytes // 2
    for entry, _ in wanted:
        watch.expect(entry.name, 1)
    for batch in iter_batches(wanted, lambda each: each[0].size_bytes, limit):
        if batch[0][0].size_bytes > limit:
            entry, memory = batch[0]
            for start in range(0, entry.size_bytes, limit):
                piece = new_memory(min(limit, entry.size_bytes - start), CPU)
                reader.read_into(entry, start, view_bytes(piece))
                watch.begin(entry.name)
                memory[start : start + piece.numel()].copy_(piece)
            watch.end(entry.name)
            continue
        pieces = [new_memory(entry.size_bytes, CPU) for entry, _ in batch]
        reader.read_all([(entry, view_bytes(piece)) for (entry, _), piece in zip(batch, pieces, strict=True)])
        for (entry, memory), piece in zip(batch, pieces, strict=True):
            watch.begin(entry.name)
            memory.copy_(piece)
            watch.end(entry.name)


def read_to_memory(reader: SnapshotReader, entry: Entry, start: int, memory: torch.Tensor) -> None:
    """Fill a tensor of bytes, on any device, with the bytes of an entry from `start` on."""
    staged = memory if memory.device == CPU else new_memory(memory.numel(), CPU)
    buffer = view_bytes(staged)
    reader.read_small(entry, start, buffer)
    if staged is not memory:
        memory.copy_(staged)


def iter_batches(items: Iterable[Item], measure: Callable[[Item], int], limit_bytes: int) -> Iterator[list[Item]]:
    """Yield the items in batches that fit into a limit; an item that exceeds it is a batch by itself."""
    batch: list[Item] = []
    batch_bytes = 0
    for item in items:
        size = measure(item)
        if batch and batch_bytes + size > limit_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size
    if batch:
        yield batch


def find_batch_count(reader: SnapshotReader) -> int:
    """Return how many small tensors to read at a time."""
    return max(_READ_AT_ONCE, reader.ahead_bytes // _SMALL_BYTES)


class SmallTensors:
    """The numbers and specs of entries that contain small tensors, in the order in which they were added."""

    def __init__(self) -> None:
        self._kinds: dict[int, int] = {}
        self._specs: list[TensorSpec] = []
        # There may be millions: ten bytes each here, where a tuple and a set would take over a hundred.
        self._numbers = array("Q")
        self._kind_of = array("I")
        self._is_added = bytearray()
        # Indexed from the lowest number on: a list takes eight bytes each, where a dict would take fifty.
        self._tensors: list[torch.Tensor | None] = []
        self._lowest = 0

    def has_kind(self, spec: TensorSpec) -> bool:
        """Return whether an entry with this spec object was added."""
        return id(spec) in self._kinds

    def add(self, number: int, spec: TensorSpec) -> None:
        """Add an entry, unless it was added before; equal specs should be one object."""
        if number >= len(self._is_added):
            self._is_added.extend(bytes(number + 1 + number // 8 - len(self._is_added)))
        if self._is_added[number]:
            return
        self._is_added[number] = 1
        kind = self._kinds.setdefault(id(spec), len(self._specs))
        if kind == len(self._specs):
            self._specs.append(spec)
        self._numbers.append(number)
        self._kind_of.append(kind)

    def put(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Store the tensors of these entries."""
        if not self._tensors:
            self._lowest = min(self._numbers)
            self._tensors = [None] * (max(self._numbers) + 1 - self._lowest)
        for number, tensor in zip(numbers, tensors, strict=True):
            self._tensors[number - self._lowest] = tensor

    def find(self, number: int) -> torch.Tensor | None:
        """Return the tensor of an entry, or None if it is not one of these or not read yet."""
        index = number - self._lowest
        return self._tensors[index] if 0 <= index < len(self._tensors) else None

    def iter_batches(self, limit_bytes: int, limit_count: int) -> Iterator[list[EntriesOfSpec]]:
        """Yield all entries in order, in batches of at most so many bytes and entries, grouped by spec; for one use."""
        batch: dict[int, EntriesOfSpec] = {}
        count = batch_bytes = 0
        sizes = [spec.span_bytes for spec in self._specs]
        for number, kind in zip(self._numbers, self._kind_of, strict=True):
            size_bytes = sizes[kind]
            if count == limit_count or (batch and batch_bytes + size_bytes > limit_bytes):
                yield list(batch.values())
                batch, count, batch_bytes = {}, 0, 0
            batch.setdefault(kind, (self._specs[kind], []))[1].append(number)
            count, batch_bytes = count + 1, batch_bytes + size_bytes
        if batch:
            yield list(batch.values())
        self._numbers, self._kind_of = array("Q"), array("I")


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


Aliases = Literal["preserve", "fresh"]
SAVED: Final = "saved"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to load, and how."""

    device: torch.device | str | None = "cpu"
    only: str | Sequence[str] | None = None
    verify: Verify = "full"
    mmap: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    aliases: Aliases = "preserve"
    allow_pickle: bool = False
    dtype: torch.dtype | None = None
    """The dtype that floating tensors are cast to, except those of registered classes; None casts nothing."""
    progress: Progress | None = None
    """Receives the progress of a whole load."""

    def __post_init__(self) -> None:
        """Refuse unknown values."""
        if self.aliases not in ("preserve", "fresh"):
            raise ValueError(f"aliases must be 'preserve' or 'fresh', not {self.aliases!r}")
        verify_mode(self.verify)
