"""Plans how chunks fill a buffer with a box of a tensor; pure.

A tensor is a span of bytes in C order. A run is a range of bytes that is contiguous in the tensor and in a box of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from math import prod
from typing import NamedTuple

from holdfast.repo.format.boxes import Box, Coordinates, is_span, overlap, relative, span_of, volume, whole
from holdfast.repo.format.chunk import ChunkRef
from holdfast.repo.format.entry import Entry, find_shape, iter_boxes
from holdfast.repo.read.stretches import Want, iter_begins, list_some_wants, list_wants, refuse_part


class Region(NamedTuple):
    """A box of a tensor of the given shape, to be read into contiguous memory in C order."""

    box: Box
    shape: Coordinates
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        """Size of the box in memory."""
        return volume(self.box) * self.item_bytes


def list_region_wants(entry: Entry, region: Region, buffer: memoryview) -> list[Want]:
    """Return the chunks that overlap a region, and how they fill `buffer` with it.

    The entry may lack some of its chunks; raises Corrupt if the region needs one of those.
    """
    if entry.dims > 1:
        return _list_from_boxes(entry, region, buffer)
    if is_span(region.box, region.shape):
        start, stop = span_of(region.box, region.shape, region.item_bytes)
        return list_some_wants(entry, start, buffer) if stop > start else []
    return _list_from_span(entry, region, buffer)


def list_entry_wants(entry: Entry, start: int, buffer: memoryview) -> list[Want]:
    """Return the chunks that fill `buffer` with the bytes of an entry from `start` on, whether boxes or spans."""
    if entry.dims < 2:
        return list_wants(entry, start, buffer)
    shape = find_shape(entry)
    item_bytes = entry.size_bytes // prod(shape)
    if start == 0 and buffer.nbytes == entry.size_bytes:
        return _list_from_boxes(entry, Region(whole(shape), shape, item_bytes), buffer)
    wants = []
    for ref, box in iter_boxes(entry):
        put = partial(_put_runs, Region(box, shape, item_bytes), start, buffer)
        if any(_clip(run, start, buffer.nbytes) for run in _iter_runs(box, shape, item_bytes)):
            wants.append(_want_whole(entry, ref, put))
    return wants


def _list_from_boxes(entry: Entry, region: Region, buffer: memoryview) -> list[Want]:
    wants = []
    found = 0
    for ref, box in iter_boxes(entry):
        common = overlap(box, region.box)
        if common is None:
            continue
        found += volume(common)
        own = relative(common, region.box.starts)
        if common == box and is_span(own, region.box.sizes):
            at, _ = span_of(own, region.box.sizes, region.item_bytes)
            wants.append(Want(entry, ref, 0, buffer, at, 0, ref.size_bytes))
        else:
            wants.append(_want_whole(entry, ref, partial(_put_common, region, common, box, buffer)))
    if found < volume(region.box):
        raise refuse_part(entry)
    return wants


def _list_from_span(entry: Entry, region: Region, buffer: memoryview) -> list[Want]:
    wants = []
    runs = list(_iter_runs(region.box, region.shape, region.item_bytes))
    first, found = 0, 0
    for ref, begin in iter_begins(entry):
        end = begin + ref.size_bytes
        while first < len(runs) and runs[first].start + runs[first].size_bytes <= begin:
            first += 1
        in_chunk = []
        for at in range(first, len(runs)):
            run = runs[at]
            if run.start >= end:
                break
            in_chunk.append(run)
            found += min(end, run.start + run.size_bytes) - max(begin, run.start)
        if in_chunk:
            wants.append(_want_whole(entry, ref, partial(_put_span, in_chunk, begin, buffer)))
    if entry.dims and found != region.size_bytes:
        raise refuse_part(entry)
    return wants


def _want_whole(entry: Entry, ref: ChunkRef, put: partial[None]) -> Want:
    """Return a want for a whole chunk, which `put` copies to the buffer."""
    return Want(entry, ref, 0, memoryview(b""), 0, 0, ref.size_bytes, put)


class _Run(NamedTuple):
    """Bytes that are contiguous in the tensor and in a box of it."""

    start: int
    """Offset in the tensor, in bytes."""
    at: int
    """Offset in the box, in bytes."""
    size_bytes: int


def _iter_runs(box: Box, shape: Coordinates, item_bytes: int) -> Iterator[_Run]:
    """Yield the runs of a box, in order."""
    dims = len(shape)
    # The innermost dims that the box covers entirely, and the next dim outwards, form one run.
    inner = dims
    while inner > 0 and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    strides = [prod(shape[dim + 1 :]) for dim in range(dims)]
    size = prod(box.sizes[outer:]) * item_bytes
    base = sum(box.starts[dim] * strides[dim] for dim in range(outer, dims))
    ranges = [range(box.starts[dim], box.starts[dim] + box.sizes[dim]) for dim in range(outer)]
    for number, indices in enumerate(product(*ranges)):
        start = base + sum(index * stride for index, stride in zip(indices, strides, strict=False))
        yield _Run(start * item_bytes, number * size, size)


def _put_common(region: Region, common: Box, box: Box, buffer: memoryview, chunk: memoryview) -> None:
    """Copy the overlap of a chunk (a box) and a region to its position in the region."""
    ours = _iter_runs(relative(common, region.box.starts), region.box.sizes, region.item_bytes)
    theirs = _iter_runs(relative(common, box.starts), box.sizes, region.item_bytes)
    _copy_runs(buffer, ours, chunk, theirs)


def _copy_runs(target: memoryview, ours: Iterator[_Run], source: memoryview, theirs: Iterator[_Run]) -> None:
    """Copy from runs to runs: both describe the same bytes in the same order, cut differently."""
    to, of = next(ours, None), next(theirs, None)
    while to is not None and of is not None:
        size = min(to.size_bytes, of.size_bytes)
        target[to.start : to.start + size] = source[of.start : of.start + size]
        to = _rest(to, size) or next(ours, None)
        of = _rest(of, size) or next(theirs, None)


def _rest(run: _Run, size: int) -> _Run | None:
    left = run.size_bytes - size
    return _Run(run.start + size, run.at + size, left) if left else None


def _put_span(runs: list[_Run], begin: int, buffer: memoryview, chunk: memoryview) -> None:
    """Copy the bytes of `runs` that a chunk contains to a region; the chunk begins at byte `begin` of the tensor."""
    for start, at, size in runs:
        low, high = max(start, begin), min(start + size, begin + chunk.nbytes)
        buffer[at + low - start : at + high - start] = chunk[low - begin : high - begin]


def _put_runs(own: Region, start: int, buffer: memoryview, chunk: memoryview) -> None:
    """Copy the bytes of a tensor from `start` on, as far as a chunk (a box) contains them."""
    for run in _iter_runs(own.box, own.shape, own.item_bytes):
        clipped = _clip(run, start, buffer.nbytes)
        if clipped:
            low, high = clipped
            at = run.at + low - run.start
            buffer[low - start : high - start] = chunk[at : at + high - low]


def _clip(run: _Run, start: int, size_bytes: int) -> tuple[int, int] | None:
    low, high = max(run.start, start), min(run.start + run.size_bytes, start + size_bytes)
    return (low, high) if low < high else None
