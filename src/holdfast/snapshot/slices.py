"""Slices of a stored tensor: reads the bytes that an index needs, and skips the chunks in between."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import EllipsisType
from typing import Any, Final

import numpy as np
import torch

from holdfast.repo.format.chunk import CHUNK_BYTES, UNIT_BYTES
from holdfast.repo.format.entry import Entry
from holdfast.repo.read.reader import SnapshotReader
from holdfast.snapshot.batches import iter_batches
from holdfast.tensors.build import CPU, apply_flags, build_tensor, plan_block
from holdfast.tensors.memory import new_memory, view_bytes, view_items, view_storage
from holdfast.tensors.spec import TensorSpec, contiguous_stride, item_bytes, items_per_byte

SliceIndex = int | slice | EllipsisType
_MIN_SKIPPED_BYTES: Final = 4096
"""Bytes between two rows are read along with them if there are fewer than this."""


def read_slice(reader: SnapshotReader, entry: Entry, spec: TensorSpec, index: object) -> torch.Tensor:
    """Read the slice that `index` selects into new, contiguous memory; raises torch's errors for a bad index."""
    # A slice of a parameter is not a parameter, and it does not share memory.
    spec = replace(spec, at=0, requires_grad=False, role="tensor")
    parts = _normalise(index, spec.shape)
    order = _find_order(spec)
    if parts is None or order is None:
        whole: Any = _read_whole(reader, entry, spec)
        part: torch.Tensor = whole[index].clone(memory_format=torch.contiguous_format)
        return part
    ranges = [_find_range(part, size) for part, size in zip(parts, spec.shape, strict=True)]
    sizes = [1 if _is_repeated(spec, dim) else spec.shape[dim] for dim in order]
    wanted = [range(1) if _is_repeated(spec, dim) else ranges[dim] for dim in order]
    found = _Rows(reader, entry, item_bytes(spec.dtype), sizes, wanted).read(spec.offset)
    found = found.permute([order.index(dim) for dim in range(len(order))])
    found = found.expand([len(each) for each in ranges])
    kept = [len(each) for each, part in zip(ranges, parts, strict=True) if not isinstance(part, int)]
    raw = found.reshape(kept).contiguous()
    tensor = torch.empty(0, dtype=spec.dtype).set_(raw.untyped_storage(), 0, raw.shape, raw.stride())
    return apply_flags(tensor, TensorSpec(spec.dtype, (), (), conj=spec.conj, neg=spec.neg))


def is_sliceable(spec: TensorSpec) -> bool:
    """Return whether slices are read without the rest of the tensor; overlapping strides, for example, prevent it."""
    return not spec.shape or _find_order(spec) is not None


def _read_whole(reader: SnapshotReader, entry: Entry, spec: TensorSpec) -> torch.Tensor:
    block = plan_block([(entry, spec)], what=entry.name)
    reader.read_all([(fill.entry, fill.buffer) for fill in block.fills])
    return build_tensor(spec, block.finish(), what=entry.name)


def _normalise(index: object, shape: Sequence[int]) -> list[int | slice] | None:
    """Return an integer or slice for each dimension; None for an index that only torch understands."""
    given = [int(part) if isinstance(part, np.integer) else part for part in _as_tuple(index)]
    is_basic = all(isinstance(part, SliceIndex) and not isinstance(part, bool) for part in given)
    if not is_basic or sum(part is Ellipsis for part in given) > 1:
        return None
    # Torch reports what is wrong with an index, before anything is read.
    torch.empty(shape, dtype=torch.uint8, device="meta")[tuple(given)]  # type: ignore[index]  # checked above
    at = next((at for at, part in enumerate(given) if part is Ellipsis), len(given))
    missing = [slice(None)] * (len(shape) - sum(part is not Ellipsis for part in given))
    return [*given[:at], *missing, *given[at + 1 :]]  # type: ignore[list-item]  # the ellipsis is left out


def _as_tuple(index: object) -> tuple[object, ...]:
    return index if isinstance(index, tuple) else (index,)


def _find_range(part: int | slice, size: int) -> range:
    if isinstance(part, int):
        return range(part % size, part % size + 1)
    return range(*part.indices(size))


def _is_repeated(spec: TensorSpec, dim: int) -> bool:
    """Return whether the tensor was expanded in this dimension, so that all of it is the same memory."""
    return spec.stride[dim] == 0 and spec.shape[dim] > 1


def _find_order(spec: TensorSpec) -> list[int] | None:
    """Return the dimensions from the outermost in memory to the innermost; None if the strides have no such order."""
    if items_per_byte(spec.dtype) > 1 or spec.quantizer is not None or spec.meta or not spec.shape:
        return None
    if spec.packed:
        return list(range(len(spec.shape)))
    order = sorted(range(len(spec.shape)), key=lambda dim: (-spec.stride[dim], -spec.shape[dim], dim))
    step = 1
    for dim in reversed(order):
        if spec.shape[dim] != 1 and not _is_repeated(spec, dim):
            if spec.stride[dim] != step and 0 not in spec.shape:
                return None
            step *= spec.shape[dim]
    return order


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a box: reads into its memory, or into other memory from which it is copied."""

    reads: Sequence[tuple[int, memoryview]]
    """Each a first byte of the entry, and a buffer."""
    staged_bytes: int = 0
    copied: tuple[torch.Tensor, torch.Tensor] | None = None
    """The items of the part, and the same items in the other memory."""

    def finish(self) -> None:
        """Copy the items after they were read."""
        if self.copied is not None:
            target, found = self.copied
            target.copy_(found)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Reads a box of items from an entry that stores them in C order."""

    reader: SnapshotReader
    entry: Entry
    item_bytes: int
    sizes: Sequence[int]
    """The stored sizes, from the outermost dimension to the innermost."""
    ranges: Sequence[range]
    """The indices to read in each dimension."""

    def read(self, offset: int) -> torch.Tensor:
        """Return the box, as items of a raw dtype; `offset` is the index of the first stored item."""
        shape = tuple(map(len, self.ranges))
        memory = new_memory(math.prod(shape) * self.item_bytes, CPU)
        items = view_items(memory, self.item_bytes, shape, contiguous_stride(shape), 0)
        parts = self._iter_parts(items, 0, offset * self.item_bytes) if memory.numel() else ()
        for batch in iter_batches(parts, lambda part: part.staged_bytes, self.reader.window_bytes):
            self.reader.read_ranges([(self.entry, start, view) for part in batch for start, view in part.reads])
            for part in batch:
                part.finish()
        return items

    def _iter_parts(self, items: torch.Tensor, dim: int, start: int) -> Iterator[_Part]:
        """Yield what fills the dimensions from `dim` on; `start` is their offset in the entry, in bytes."""
        rows = self.ranges[dim]
        row_bytes = math.prod(self.sizes[dim + 1 :]) * self.item_bytes
        rest = self.ranges[dim + 1 :]
        is_whole = all(part == range(size) for part, size in zip(rest, self.sizes[dim + 1 :], strict=True))
        if is_whole and (len(rows) == 1 or rows.step == 1):
            begin = int(items.storage_offset()) * self.item_bytes
            target = view_storage(items.untyped_storage(), begin, begin + len(rows) * row_bytes)
            yield _Part([(start + rows[0] * row_bytes, view_bytes(target))])
        elif row_bytes >= CHUNK_BYTES or (len(rows) == 1 and rest):
            for number, row in enumerate(rows):
                yield from self._iter_parts(items[number], dim + 1, start + row * row_bytes)
        else:
            yield from self._iter_blocks(items, dim, start, row_bytes)

    def _iter_blocks(self, items: torch.Tensor, dim: int, start: int, row_bytes: int) -> Iterator[_Part]:
        """Yield reads of many small rows at a time, with the bytes between them, of which only some are copied."""
        inner = tuple(self.sizes[dim + 1 :])
        rest = [slice(part.start, part.stop, part.step) for part in self.ranges[dim + 1 :]]
        done = 0
        for block in _split(self.ranges[dim], row_bytes):
            shape = (block[-1] - block[0] + 1, *inner)
            memory = new_memory(shape[0] * row_bytes, CPU)
            view, low = view_bytes(memory), start + block[0] * row_bytes
            needed = self._find_needed(block, start, row_bytes)
            reads = [(first, view[first - low : last - low]) for first, last in needed]
            found = view_items(memory, self.item_bytes, shape, contiguous_stride(shape), 0)
            picked = (slice(None, None, block.step), *rest)
            yield _Part(reads, memory.numel(), (items[done : done + len(block)], found[picked]))
            done += len(block)

    def _find_needed(self, rows: range, start: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield which bytes to read for some rows, without the chunks between them."""
        if (rows.step - 1) * row_bytes < _MIN_SKIPPED_BYTES:
            yield start + rows[0] * row_bytes, start + (rows[-1] + 1) * row_bytes
            return
        ends = list(accumulate(ref.size_bytes for ref in self.entry.chunks))
        begin, stop = start + rows[0] * row_bytes, start + rows[0] * row_bytes
        for row in rows:
            low = start + row * row_bytes
            if bisect_right(ends, low) > bisect_right(ends, max(stop - 1, begin)) + 1:
                yield begin, stop
                begin = low
            stop = low + row_bytes
        yield begin, stop


def _split(rows: range, row_bytes: int) -> Iterator[range]:
    """Yield the rows in blocks for one read each; blocks end where chunks end."""
    per_chunk = max(1, CHUNK_BYTES // row_bytes)
    span = per_chunk * max(1, UNIT_BYTES // (per_chunk * row_bytes))
    first = 0
    while first < len(rows):
        limit = (rows[first] // span + 1) * span
        last = first + -(-(limit - rows[first]) // rows.step)
        yield rows[first:last]
        first = last
