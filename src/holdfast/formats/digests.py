"""Digests of tensors and streams for receipts, and how much a cast changes the values of a tensor."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Protocol

import torch
from blake3 import blake3

from holdfast.digest import Digest, hash_bytes
from holdfast.formats.receipt import CastErrors
from holdfast.repo.format.boxes import Box, Coordinates, cut_rows, whole
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import Entry, iter_boxes
from holdfast.repo.format.grid import Extent, cut_extent
from holdfast.tensors.spec import count_bytes, item_bytes, items_per_byte


def cut_cells(dtype: torch.dtype, shape: Coordinates) -> list[int]:
    """Return where the cells of a tensor end, in bytes of its items in C order."""
    size_bytes = count_bytes(dtype, math.prod(shape))
    if not size_bytes:
        return []
    is_cut_by_rows = items_per_byte(dtype) == 1
    return cut_extent(Extent(0, size_bytes, item_bytes(dtype), shape if is_cut_by_rows else ()))


def combine_cells(digests: Sequence[Digest]) -> Digest:
    """Return the digest of a tensor by the digests of its cells."""
    return digests[0] if len(digests) == 1 else hash_bytes(b"".join(digests))


def find_stored_digest(entry: Entry, dtype: torch.dtype, shape: Coordinates) -> Digest | None:
    """Return the digest of a tensor whose items an entry stores in C order; None if its chunks are not its cells."""
    if entry.dims > 1:
        return _find_boxed(entry, dtype, shape)
    chunks = entry.chunks
    if entry.dims:
        chunks = tuple(sorted(chunks, key=lambda ref: ref.box[0]))
    ends = cut_cells(dtype, shape)
    if list(accumulate(ref.size_bytes for ref in chunks)) != ends or not _is_span(entry, chunks):
        return None
    return combine_cells([ref.digest for ref in chunks])


def _is_span(entry: Entry, chunks: Sequence[ChunkRef]) -> bool:
    """Return whether chunks follow each other without a gap."""
    starts = accumulate((ref.size_bytes for ref in chunks), initial=0)
    return not entry.dims or all(ref.box[0] == start for ref, start in zip(chunks, starts, strict=False))


def _find_boxed(entry: Entry, dtype: torch.dtype, shape: Coordinates) -> Digest | None:
    if entry.dims != len(shape) or items_per_byte(dtype) > 1:
        return None
    stored: dict[Box, Digest] = {box: ref.digest for ref, box in iter_boxes(entry)}
    found = [stored.get(cell) for cell in cut_rows(whole(shape), shape, item_bytes(dtype))]
    known = [digest for digest in found if digest is not None]
    return combine_cells(known) if len(known) == len(found) == len(stored) else None


class CellDigest:
    """Digests the items of a tensor, which are passed in C order."""

    def __init__(self, dtype: torch.dtype, shape: Coordinates) -> None:
        self._ends = iter(cut_cells(dtype, shape))
        self._end = next(self._ends, 0)
        self._at = 0
        self._hasher: blake3 | None = None
        self._digests: list[Digest] = []

    def update(self, data: memoryview) -> None:
        """Add the next bytes."""
        while data:
            part, data = data[: self._end - self._at], data[self._end - self._at :]
            assert part, "no tensor has more bytes than its cells"
            self._at += len(part)
            is_whole = self._hasher is None and self._at == self._end
            if is_whole:
                self._digests.append(hash_bytes(part))
            else:
                self._hasher = self._hasher or blake3()
                self._hasher.update(part)
            if self._at == self._end:
                self._end_cell()

    def digest(self) -> Digest:
        """Return the digest of the tensor, all of whose bytes were added."""
        return combine_cells(self._digests)

    def _end_cell(self) -> None:
        if self._hasher is not None:
            self._digests.append(Digest(self._hasher.digest()))
        self._hasher = None
        self._end = next(self._ends, self._end)


def add_cast_errors(errors: CastErrors, before: torch.Tensor, after: torch.Tensor) -> CastErrors:
    """Return the errors so far, with those of another piece of the tensor.

    Values that were infinite or NaN before the cast do not count.
    """
    exact, cast = before.to(torch.float64), after.to(torch.float64)
    was_finite = exact.isfinite()
    overflowed = was_finite & ~cast.isfinite()
    gaps = torch.where(was_finite & ~overflowed, (cast - exact).abs(), 0.0)
    shares = torch.where(exact != 0, gaps / exact.abs(), 0.0)
    return CastErrors(
        max(errors.max_abs, _find_max(gaps)),
        max(errors.max_rel, _find_max(shares)),
        errors.num_overflowed + int(overflowed.sum()),
    )


def _find_max(values: torch.Tensor) -> float:
    return float(values.nan_to_num(0.0).max()) if values.numel() else 0.0


_WAITING_BYTES: Final = 32 << 20
"""Pieces that wait for an earlier one may take this much memory, in all streams of a group."""


class StreamHasher(Protocol):
    """Digests bytes that are passed in order."""

    def update(self, data: memoryview, /) -> object:
        """Add the next bytes."""

    def digest(self) -> bytes:
        """Return the digest of all bytes."""


class WaitingRoom:
    """Limits the memory of pieces that wait, for a group of streams that one save reads."""

    def __init__(self, limit_bytes: int = _WAITING_BYTES) -> None:
        self.changed = threading.Condition()
        self.limit_bytes = limit_bytes
        self.waiting_bytes = 0


class StreamDigest:
    """Digests the bytes [0, size) of a stream; a piece that was digested before is ignored.

    Pieces must not overlap in part. The caller reads them in order, a few at a time: the first that is missing is
    always being read, so that waiting for it ends.
    """

    def __init__(self, size_bytes: int, room: WaitingRoom, hasher: StreamHasher) -> None:
        self._size_bytes = size_bytes
        self._room = room
        self._hasher = hasher
        self._next = 0
        self._waiting: dict[int, memoryview] = {}
        self._is_hashing = False

    def add(self, start: int, data: memoryview) -> None:
        """Digest a piece, now or once the pieces before it have arrived; keeps `data` until then."""
        room = self._room
        with room.changed:
            room.changed.wait_for(lambda: start <= self._next or room.waiting_bytes <= room.limit_bytes)
            if start < self._next or start in self._waiting or not data:
                return
            self._waiting[start] = data
            room.waiting_bytes += len(data)
            if self._is_hashing:
                return
            self._is_hashing = True
        self._hash_arrived()

    def _hash_arrived(self) -> None:
        """Hash the pieces that are next, on this thread; other threads only leave theirs meanwhile."""
        room, done_bytes = self._room, 0
        while True:
            with room.changed:
                self._next += done_bytes
                room.waiting_bytes -= done_bytes
                data = self._waiting.pop(self._next, None)
                room.changed.notify_all()
                if data is None:
                    self._is_hashing = False
                    return
            self._hasher.update(data)
            done_bytes = len(data)

    def finish(self) -> Digest | None:
        """Return the digest; None if not every byte has arrived."""
        with self._room.changed:
            return Digest(self._hasher.digest()) if self._next == self._size_bytes else None
