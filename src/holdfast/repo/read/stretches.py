"""Plans reads: sorts wanted chunks by location and merges them into stretches of packs; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.errors import Corrupt
from holdfast.objects.blocks import PAGE_BYTES, copy_bytes
from holdfast.repo.format.chunk import RAW, UNIT_BYTES, ChunkRef, Location
from holdfast.repo.format.entry import Entry

STRETCH_BYTES: Final = 8 << 20
"""Largest single read: large enough that the cost of a call, which needs the GIL, is small beside it."""
BLOCK_BYTES: Final = STRETCH_BYTES + PAGE_BYTES
_GAP_BYTES: Final = 32 << 10
"""A gap between wanted chunks up to this size is read too: a second read would cost more."""
_OWN_BYTES: Final = 1 << 20
"""From this size on, chunks for different buffers are read separately, each directly into its buffer."""
READ_COST_BYTES: Final = 64 << 10
"""The fixed cost of a read, as a number of bytes that would take as long."""


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
    place: Callable[[memoryview], None] | None = None
    """Copies the chunk to the buffer, if the wanted bytes are not contiguous there."""

    @property
    def location(self) -> Location:
        """The location stated by the manifest; the chunk must not be inline."""
        assert self.ref.location is not None, "inline chunks have no location"
        return self.ref.location

    @property
    def is_plainly_stored(self) -> bool:
        """Return whether the bytes at its location are the chunk's bytes, not compressed or inline."""
        at = self.ref.location
        return at is not None and at.codec == RAW and at.stored_bytes == self.ref.size_bytes

    @property
    def is_whole(self) -> bool:
        """Return whether all of the chunk is wanted."""
        return self.size_bytes == self.ref.size_bytes

    def put(self, chunk: memoryview) -> None:
        """Copy the wanted bytes of `chunk` to the buffer."""
        if self.place is not None:
            self.place(chunk)
            return
        copy_bytes(self.buffer[self.at : self.at + self.size_bytes], chunk[self.skip : self.skip + self.size_bytes])


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
        """Yield each want with the bytes of its chunk; `data` is the whole stretch."""
        for want in self.wants:
            first = want.location.offset - self.start
            yield want, data[first : first + want.ref.size_bytes]

    def find_target(self) -> memoryview | None:
        """Return the memory to read directly into; None unless the chunks are whole and contiguous in one buffer."""
        first = self.wants[0]
        end = first.at
        for want in self.wants:
            in_pack, in_buffer = want.location.offset - self.start, want.at - first.at
            if want.buffer is not first.buffer or not want.is_whole or want.place or in_pack != in_buffer:
                return None
            end = want.at + want.size_bytes
        return first.buffer[first.at : end]


def plan_stretches(wants: Sequence[Want]) -> Iterator[Stretch]:
    """Yield the reads that fetch these chunks, by pack and offset."""
    open_wants: list[Want] = []
    pack_id, start, stop = "", 0, 0
    for want in sorted(wants, key=lambda want: (want.location.pack_id, want.location.offset)):
        at = want.location
        end = at.offset + at.stored_bytes
        if open_wants and (
            at.pack_id != pack_id
            or at.offset > stop + _GAP_BYTES
            or end - start > STRETCH_BYTES
            or (want.buffer is not open_wants[-1].buffer and max(stop - start, at.stored_bytes) >= _OWN_BYTES)
        ):
            yield Stretch(pack_id, start, stop, open_wants)
            open_wants = []
        if not open_wants:
            pack_id, start, stop = at.pack_id, at.offset, end
        open_wants.append(want)
        stop = max(stop, end)
    if open_wants:
        yield Stretch(pack_id, start, stop, open_wants)


def group_stretches(stretches: Iterable[Stretch]) -> Iterator[tuple[list[Stretch], int]]:
    """Yield batches of stretches, each enough work for a thread, with the cost of each batch in bytes."""
    batch: list[Stretch] = []
    size = 0
    for stretch in stretches:
        cost = stretch.size_bytes + READ_COST_BYTES
        if batch and size + cost > UNIT_BYTES:
            yield batch, size
            batch, size = [], 0
        batch.append(stretch)
        size += cost
    if batch:
        yield batch, size


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
