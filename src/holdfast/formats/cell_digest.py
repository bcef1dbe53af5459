"""The digest of a tensor in a receipt: over the digests of its cells, so that a stored tensor need not be hashed again.

Cells are the chunks that a save cuts a tensor into (section 7 of docs/reference/format.md). The digest of a tensor of
one cell is the BLAKE3 of its bytes; of a larger one, the BLAKE3 of the digests of its cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from blake3 import blake3

from holdfast.digest import Digest, hash_bytes
from holdfast.repo.format.boxes import Box, Coordinates, cut_rows, whole
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import Entry, iter_boxes
from holdfast.repo.format.grid import Extent, cut_extent
from holdfast.tensors.dtypes import item_bytes, items_per_byte
from holdfast.tensors.spec import count_bytes


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
