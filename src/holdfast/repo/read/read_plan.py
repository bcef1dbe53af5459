"""Plans reads, without I/O: which chunks fill a buffer or a region, and which stretches of packs contain them.

A tensor is a span of bytes in C order. A run is a range of bytes that is contiguous in the tensor and in a box of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Final, NamedTuple

from holdfast.errors import Corrupt
from holdfast.objects.blocks import PAGE_BYTES, copy_bytes
from holdfast.objects.protocol import StoreTraits
from holdfast.repo.format.boxes import Box, Coordinates, is_span, overlap, relative, span_of, volume, whole
from holdfast.repo.format.chunk import DELTA, RAW, UNIT_BYTES, ChunkRef, Location, has_possible_size, iter_places
from holdfast.repo.format.entry import Entry, find_shape, iter_boxes

STRETCH_BYTES: Final = 8 << 20
"""Largest single read: large enough that the cost of a call, which needs the GIL, is small beside it."""
BLOCK_BYTES: Final = STRETCH_BYTES + PAGE_BYTES
_REQUEST_BYTES: Final = 2 << 20
"""Smallest size that requests are merged to: below it, a request costs more than its bytes."""
_REQUESTS: Final = 32
"""A read is cut into at least this many requests, if they are not too small: they are in flight at the same time."""
READ_COST_BYTES: Final = 64 << 10
"""The fixed cost of a read, as a number of bytes that would take as long."""


@dataclass(frozen=True, slots=True)
class StretchRules:
    """Which chunks one read fetches together: reads from a disk and requests to a server have different costs."""

    largest_bytes: int
    """Largest single read, unless a single chunk is larger."""
    gap_bytes: int
    """A gap between wanted chunks up to this size is read too: a second read would cost more."""
    own_bytes: int
    """From this size on, chunks for different buffers are read separately, each directly into its buffer."""
    batch_bytes: int
    """Small reads are made one after the other by one thread, up to this many bytes; 0 if each waits for a server."""


DISK_RULES: Final = StretchRules(STRETCH_BYTES, gap_bytes=32 << 10, own_bytes=1 << 20, batch_bytes=UNIT_BYTES)


_RUN_STRETCH_BYTES: Final = 2 << 20
"""Largest read through the page cache: after the copy, the bytes are hashed while they are in the processor's cache."""
_RUN_BYTES: Final = 64 << 20
"""How much one thread reads in sequence, if there is enough for all threads: the kernel then reads ahead."""
_RUNS: Final = 4
"""Runs for each thread, so that threads end at about the same time."""


def plan_runs(size_bytes: int, *, threads: int) -> StretchRules:
    """Return the rules for reading `size_bytes` through the page cache on that many threads."""
    run_bytes = max(UNIT_BYTES, min(_RUN_BYTES, size_bytes // (_RUNS * threads)))
    return replace(DISK_RULES, largest_bytes=_RUN_STRETCH_BYTES, batch_bytes=run_bytes)


def choose_rules(traits: StoreTraits, *, threads: int, budget_bytes: int, keep: bool) -> Callable[[int], StretchRules]:
    """Return the function that plans reads of so many bytes, on so many threads, from a store with these traits."""
    if traits.wait_bytes:
        return partial(plan_requests, budget_bytes=budget_bytes, at_once=threads)
    return partial(plan_runs, threads=threads) if keep else _plan_disk


def _plan_disk(_size_bytes: int) -> StretchRules:
    return DISK_RULES


def plan_requests(size_bytes: int, *, budget_bytes: int, at_once: int) -> StretchRules:
    """Return the rules for reading `size_bytes` from a server, which should have `at_once` requests in flight."""
    wished = min(-(-size_bytes // _REQUESTS), budget_bytes // at_once)
    largest = max(_REQUEST_BYTES, min(wished, STRETCH_BYTES))
    return StretchRules(largest, gap_bytes=128 << 10, own_bytes=STRETCH_BYTES, batch_bytes=0)


@dataclass(slots=True)
class Want:
    """A wanted chunk, or a part of one, and the buffer that its bytes go to."""

    entry: Entry
    ref: ChunkRef
    start: int
    """Offset of the chunk in its entry."""
    buffer: memoryview
    at: int
    """Offset in the buffer at which the bytes are put."""
    skip: int
    """Offset in the chunk of the first wanted byte."""
    size_bytes: int
    """How many bytes are wanted."""
    scatter: Callable[[memoryview], None] | None = None
    """Copies the chunk to the buffer, if the wanted bytes are not contiguous there."""
    under: memoryview | None = None
    """For a delta: memory for its base, which is read first, and then becomes the chunk."""
    of: Want | None = None
    """For a base: the delta that it is read for."""

    @property
    def location(self) -> Location:
        """The location stated by the manifest; the chunk must not be inline."""
        assert self.ref.location is not None, "inline chunks have no location"
        return self.ref.location

    @property
    def is_packed(self) -> bool:
        """Return whether the chunk is in a pack, in a form that this version can read."""
        at = self.ref.location
        if at is None or (at.codec == DELTA) != (at.base is not None):
            return False
        return all(has_possible_size(each.codec, each.stored_bytes, self.ref.size_bytes) for each in iter_places(at))

    @property
    def is_raw(self) -> bool:
        """Return whether the stored bytes are the chunk's own, not encoded."""
        return self.location.codec == RAW

    @property
    def is_whole(self) -> bool:
        """Return whether all of the chunk is wanted."""
        return self.size_bytes == self.ref.size_bytes

    def find_target(self) -> memoryview | None:
        """Return the memory for the whole chunk; None if only a part is wanted, or it is not contiguous there."""
        return self.buffer[self.at : self.at + self.size_bytes] if self.is_whole and self.scatter is None else None

    def find_base(self) -> Want:
        """Return a want for the base of a delta: to the memory of the chunk, if all of it is wanted there."""
        base = self.location.base
        assert base is not None, "only deltas have one"
        target = self.find_target()
        self.under = memoryview(bytearray(self.ref.size_bytes)) if target is None else target
        ref = ChunkRef(base.digest, self.ref.size_bytes, base.location)
        return Want(self.entry, ref, self.start, self.under, 0, 0, self.ref.size_bytes, of=self)

    def put(self, chunk: memoryview) -> None:
        """Copy the wanted bytes of `chunk` to the buffer."""
        if self.scatter is not None:
            self.scatter(chunk)
            return
        copy_bytes(self.buffer[self.at : self.at + self.size_bytes], chunk[self.skip : self.skip + self.size_bytes])


def cut_windows(wants: Sequence[Want], limit_bytes: int) -> Iterator[list[Want]]:
    """Yield deltas in groups. The bases of a group need at most `limit_bytes` beside the buffers, or one chunk."""
    window: list[Want] = []
    size = 0
    for want in wants:
        cost = want.ref.size_bytes if want.find_target() is None else 0
        if window and size + cost > limit_bytes:
            yield window
            window, size = [], 0
        window.append(want)
        size += cost
    if window:
        yield window


def list_wants(entry: Entry, start: int, buffer: memoryview) -> list[Want]:
    """Return the chunks, whole or in part, that fill `buffer` with the bytes of an entry from `start` on."""
    if entry.dims:
        raise refuse_part(entry)
    return list_some_wants(entry, start, buffer)


def list_some_wants(entry: Entry, start: int, buffer: memoryview) -> list[Want]:
    """Do as `list_wants` for an entry that may lack chunks; raises Corrupt if a needed one is missing."""
    stop = start + buffer.nbytes
    wants = []
    for ref, begin in iter_begins(entry):
        low, high = max(begin, start), min(begin + ref.size_bytes, stop)
        if low < high:
            wants.append(Want(entry, ref, begin, buffer, low - start, low - begin, high - low))
    if entry.dims and sum(want.size_bytes for want in wants) != buffer.nbytes:
        raise refuse_part(entry)
    return wants


def iter_begins(entry: Entry) -> Iterator[tuple[ChunkRef, int]]:
    """Yield the chunks of an entry that is a span of bytes, each with its offset in the entry."""
    end = 0
    for ref in entry.chunks:
        begin = ref.box[0] if entry.dims else end
        end = begin + ref.size_bytes
        yield ref, begin


def refuse_part(entry: Entry) -> Corrupt:
    """Return the error for a read of bytes that this part of an entry does not contain."""
    return Corrupt(
        f"{entry.name!r} is only one part of an entry, and its manifest does not name the others; run `holdfast check`"
    )


@dataclass(frozen=True, slots=True)
class Stretch:
    """Chunks of one pack that one read fetches."""

    pack_id: str
    start: int
    stop: int
    wants: Sequence[Want]

    @property
    def size_bytes(self) -> int:
        """How many bytes the read fetches."""
        return self.stop - self.start

    def iter_parts(self, data: memoryview) -> Iterator[tuple[Want, memoryview]]:
        """Yield each want with the stored bytes of its chunk; `data` is the whole stretch."""
        for want in self.wants:
            first = want.location.offset - self.start
            yield want, data[first : first + want.location.stored_bytes]

    def narrow(self, wants: Sequence[Want]) -> Stretch:
        """Return the shortest stretch that contains some of its chunks."""
        places = [want.location for want in wants]
        start, stop = min(at.offset for at in places), max(at.offset + at.stored_bytes for at in places)
        return Stretch(self.pack_id, start, stop, wants)

    def find_target(self) -> memoryview | None:
        """Return the memory to read directly into; None unless the chunks are whole and contiguous in one buffer."""
        first = self.wants[0]
        end = first.at
        for want in self.wants:
            in_pack, in_buffer = want.location.offset - self.start, want.at - first.at
            is_direct = want.is_raw and want.is_whole and not want.scatter
            if want.buffer is not first.buffer or not is_direct or in_pack != in_buffer:
                return None
            end = want.at + want.size_bytes
        return first.buffer[first.at : end]


def plan_stretches(wants: Sequence[Want], rules: StretchRules = DISK_RULES) -> Iterator[Stretch]:
    """Yield the reads that fetch these chunks, by pack and offset."""
    open_wants: list[Want] = []
    pack_id, start, stop = "", 0, 0
    for want in sorted(wants, key=lambda want: (want.location.pack_id, want.location.offset)):
        at = want.location
        end = at.offset + at.stored_bytes
        if open_wants and (
            at.pack_id != pack_id
            or at.offset > stop + rules.gap_bytes
            or end - start > rules.largest_bytes
            or (want.buffer is not open_wants[-1].buffer and max(stop - start, at.stored_bytes) >= rules.own_bytes)
        ):
            yield Stretch(pack_id, start, stop, open_wants)
            open_wants = []
        if not open_wants:
            pack_id, start, stop = at.pack_id, at.offset, end
        open_wants.append(want)
        stop = max(stop, end)
    if open_wants:
        yield Stretch(pack_id, start, stop, open_wants)


def group_stretches(
    stretches: Iterable[Stretch], rules: StretchRules = DISK_RULES
) -> Iterator[tuple[list[Stretch], int]]:
    """Yield batches of stretches, each enough work for a thread, which reads one after the other.

    With each batch comes the cost of its largest stretch in bytes: so much is in progress at a time.
    """
    batch: list[Stretch] = []
    size, largest = 0, 0
    for stretch in stretches:
        cost = stretch.size_bytes + READ_COST_BYTES
        if batch and size + cost > rules.batch_bytes:
            yield batch, largest
            batch, size, largest = [], 0, 0
        batch.append(stretch)
        size, largest = size + cost, max(largest, cost)
    if batch:
        yield batch, largest


def is_in_one_piece(entry: Entry) -> bool:
    """Return whether the bytes of an entry are stored raw and contiguous in one pack."""
    if entry.dims:
        return False
    end: tuple[str, int] | None = None
    for ref in entry.chunks:
        at = ref.location
        if at is None or at.codec != RAW or at.stored_bytes != ref.size_bytes:
            return False
        if end is not None and end != (at.pack_id, at.offset):
            return False
        end = (at.pack_id, at.offset + at.stored_bytes)
    return end is not None


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
