"""Reads stored tensors as bytes in C order, in pieces of bounded size; every chunk is verified."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Final

from holdfast.digest import Digest
from holdfast.formats.digests import find_stored_digest
from holdfast.repo.format.boxes import Box, volume, whole
from holdfast.repo.format.entry import Entry
from holdfast.repo.read.read_plan import Region
from holdfast.snapshot.opened import Opened
from holdfast.snapshot.slices import read_slice
from holdfast.tensors.memory import view_bytes, view_storage
from holdfast.tensors.spec import TensorSpec, contiguous_stride

_MAX_PIECE_BYTES: Final = 16 << 20
"""Large enough that several threads work on one piece; about eight of them are in memory at a time."""
_MIN_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SnapshotTensor:
    """An ordinary tensor of a snapshot: its name there, the number of its entry, and its spec."""

    name: str
    number: int
    spec: TensorSpec

    @property
    def item_bytes(self) -> int:
        """The size of an item in bytes."""
        return self.spec.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """The number of bytes of all items, in C order and without gaps; repeated items are counted each time."""
        return math.prod(self.spec.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Bytes of a tensor, contiguous in C order."""

    tensor: SnapshotTensor
    start: int
    stop: int
    box: Box | None = None
    """The items; None if the entry stores all items in C order."""

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the piece."""
        return self.stop - self.start


def iter_slabs(box: Box, item_bytes: int, limit_bytes: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit_bytes` (or one item), in C order; each is contiguous in `box`."""
    sizes = box.sizes
    if not volume(box):
        return
    if not sizes:
        yield box
        return
    dim = 0
    while dim < len(sizes) - 1 and math.prod(sizes[dim + 1 :]) * item_bytes > limit_bytes:
        dim += 1
    rows = max(1, limit_bytes // (math.prod(sizes[dim + 1 :]) * item_bytes))
    for outer in product(*(range(box.starts[at], box.stops[at]) for at in range(dim))):
        for first in range(0, sizes[dim], rows):
            starts = (*outer, box.starts[dim] + first, *box.starts[dim + 1 :])
            yield Box(starts, (*(1,) * dim, min(rows, sizes[dim] - first), *sizes[dim + 1 :]))


class PieceReader:
    """Plans and reads the pieces of the tensors of one open snapshot. Safe in any thread."""

    def __init__(self, opened: Opened) -> None:
        """Derive the sizes of pieces from the memory budget of the reader."""
        self._opened = opened
        budget_bytes = opened.reader.budget_bytes
        self.piece_bytes = max(_MIN_PIECE_BYTES, min(_MAX_PIECE_BYTES, budget_bytes // 8))
        """The largest size of a piece that `read` reads into the caller's buffer."""
        # Each piece of a transposed tensor may need chunks of the whole tensor, so larger pieces read less.
        self._slice_bytes = max(self.piece_bytes, budget_bytes // 4)

    def iter_pieces(self, tensor: SnapshotTensor, rows: Box | None = None) -> Iterator[TensorPiece]:
        """Yield the pieces of a tensor, or of some rows of its first dimension, in C order."""
        box = whole(tensor.spec.shape) if rows is None else rows
        start = _find_start(tensor, box)
        stop = start + volume(box) * tensor.item_bytes
        entry = self._opened.entry(tensor.number)
        if _is_plain(tensor.spec) and entry.dims < 2:
            yield from _iter_spans(tensor, entry, start, stop, self.piece_bytes)
            return
        limit = self.piece_bytes if _is_plain(tensor.spec) else self._slice_bytes
        for slab in iter_slabs(box, tensor.item_bytes, limit):
            start = _find_start(tensor, slab)
            yield TensorPiece(tensor, start, start + volume(slab) * tensor.item_bytes, slab)

    def find_digest(self, tensor: SnapshotTensor) -> Digest | None:
        """Return the digest of a tensor for a receipt, if its stored chunks tell it; `read` verifies each of them."""
        entry, spec = self._opened.entry(tensor.number), tensor.spec
        if not _is_plain(spec) or entry.size_bytes != tensor.size_bytes:
            return None
        return find_stored_digest(entry, spec.dtype, spec.shape)

    def needs_buffer(self, piece: TensorPiece) -> bool:
        """Return whether `read` reads a piece into the caller's buffer, and not into new memory."""
        return _is_plain(piece.tensor.spec)

    def read(self, pieces: Sequence[TensorPiece], buffer: memoryview) -> list[memoryview]:
        """Read pieces, into `buffer` one after the other if they need it, and return the bytes of each."""
        views: list[memoryview] = []
        spans: list[tuple[Entry, int, memoryview]] = []
        regions: list[tuple[Entry, Region, memoryview]] = []
        at = 0
        for piece in pieces:
            entry, spec = self._opened.entry(piece.tensor.number), piece.tensor.spec
            if not self.needs_buffer(piece):
                views.append(_read_slice(self._opened, entry, piece))
                continue
            views.append(buffer[at : at + piece.size_bytes])
            at += piece.size_bytes
            if piece.box is None:
                spans.append((entry, _find_offset(spec) + piece.start, views[-1]))
            else:
                regions.append((entry, Region(piece.box, spec.shape, piece.tensor.item_bytes), views[-1]))
        self._opened.reader.read_ranges(spans)
        self._opened.reader.read_regions(regions)
        return views


def _iter_spans(tensor: SnapshotTensor, entry: Entry, start: int, stop: int, limit: int) -> Iterator[TensorPiece]:
    """Yield pieces of at most `limit` bytes; they end where chunks end, so that no chunk is read twice."""
    is_cut = stop - start > limit and not entry.dims
    # Chunks begin at the entry's first byte, and the tensor may begin later.
    offset = _find_offset(tensor.spec)
    ends = [end - offset for end in accumulate(ref.size_bytes for ref in entry.chunks)] if is_cut else []
    step = limit // tensor.item_bytes * tensor.item_bytes
    while start < stop:
        last = min(stop, start + step)
        aligned = ends[bisect_right(ends, last) - 1] if ends and last < stop else last
        if start < aligned < last and aligned % tensor.item_bytes == 0:
            last = aligned
        yield TensorPiece(tensor, start, last)
        start = last


def _is_plain(spec: TensorSpec) -> bool:
    """Return whether the entry's bytes are the tensor's items in C order, apart from bytes before and after them."""
    return not (spec.conj or spec.neg) and is_c_order(spec)


def is_c_order(spec: TensorSpec) -> bool:
    """Return whether the entry stores the items one after the other in C order."""
    if spec.packed:
        return spec.packed_shape == spec.shape
    steps = zip(spec.shape, spec.stride, contiguous_stride(spec.shape), strict=True)
    return 0 in spec.shape or all(size == 1 or step == wanted for size, step, wanted in steps)


def _find_offset(spec: TensorSpec) -> int:
    return 0 if spec.packed else spec.offset * spec.dtype.itemsize


def _find_start(tensor: SnapshotTensor, box: Box) -> int:
    strides = contiguous_stride(tensor.spec.shape)
    return sum(at * step for at, step in zip(box.starts, strides, strict=True)) * tensor.item_bytes


def _read_slice(opened: Opened, entry: Entry, piece: TensorPiece) -> memoryview:
    assert piece.box is not None
    index = tuple(map(slice, piece.box.starts, piece.box.stops))
    found = read_slice(opened.reader, entry, piece.tensor.spec, index or ...)
    found = found.resolve_conj().resolve_neg().contiguous()
    return view_bytes(view_storage(found.untyped_storage(), 0, piece.size_bytes))
