"""Reads every byte of packs on all cores, and reports damaged chunks and padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from holdfast.digest import fingerprint, hash_bytes
from holdfast.errors import Corrupt, NotFound, StoreError
from holdfast.objects.blocks import BlockPool
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.engine import Engine
from holdfast.repo.format.chunk import CHUNK_BYTES, WHOLE
from holdfast.repo.format.codecs.codec import open_stored
from holdfast.repo.format.layout import pack_key
from holdfast.repo.format.pack import PAGE_BYTES, Footer, PackedChunk
from holdfast.repo.stages import Stages

_READ_BYTES: Final = 4 * CHUNK_BYTES
"""Size of one read: smaller reads make a disk slower, larger ones do not fit in the CPU cache."""
_BATCH: Final = 4
"""Sections per task: handing over a single one costs as much as opening its file."""
_BUFFER_BYTES: Final = _READ_BYTES + 2 * PAGE_BYTES
_ZEROS: Final = bytes(PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class PackSection:
    """A part of a pack that is read at once: whole chunks and their padding."""

    pack_id: str
    start: int
    stop: int
    chunks: tuple[PackedChunk, ...]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What was found when a section was read."""

    section: PackSection
    bad_chunks: tuple[PackedChunk, ...] = ()
    has_bad_padding: bool = False
    error: str = ""
    """Why the section could not be read; empty if it could."""


def cut_pack(pack_id: str, footer: Footer, *, data_start: int) -> Iterator[PackSection]:
    """Cut the part of a pack between header and footer into sections."""
    start = end = data_start
    chunks: list[PackedChunk] = []
    for chunk in footer.chunks:
        stop = chunk.location.offset + chunk.location.stored_bytes
        if chunks and stop - start > _READ_BYTES:
            yield PackSection(pack_id, start, end, tuple(chunks))
            start, chunks = end, []
        chunks.append(chunk)
        end = stop
    yield PackSection(pack_id, start, footer.footer_offset, tuple(chunks))


class Scrubber:
    """Reads and verifies sections on an engine's threads, which reuse their buffers."""

    def __init__(self, store: ObjectStore, engine: Engine, stages: Stages) -> None:
        """Read from `store` on the threads of `engine`."""
        self._store = store
        self._stages = stages
        self._engine = engine
        self._blocks = BlockPool(_BUFFER_BYTES, kept=engine.threads, huge=True)

    def scrub(self, sections: Iterable[PackSection]) -> Iterator[Scrubbed]:
        """Yield the result of each section, in order, while others are read in the background."""
        for batch in self._engine.iter_results(self._scrub_batch, _iter_batches(sections)):
            yield from batch

    def _scrub_batch(self, batch: Sequence[PackSection]) -> list[Scrubbed]:
        return [self._scrub_one(section) for section in batch]

    def _scrub_one(self, section: PackSection) -> Scrubbed:
        with self._blocks.lend() as block:
            return self._scrub_in(block, section)

    def _scrub_in(self, block: memoryview, section: PackSection) -> Scrubbed:
        # Read from a page boundary into an aligned buffer: direct I/O then needs no copy.
        before, size = section.start % PAGE_BYTES, section.stop - section.start
        if before + size > len(block):
            block = memoryview(bytearray(before + size))
        try:
            with self._stages.time("read", size):
                self._store.read_into(pack_key(section.pack_id), section.start - before, block[: before + size])
        except (NotFound, Corrupt, StoreError) as error:
            return Scrubbed(section, section.chunks, error=str(error))
        with self._stages.time("verify", size):
            return _verify_section(section, block[before : before + size])


def _verify_section(section: PackSection, data: memoryview) -> Scrubbed:
    """Return the chunks that are damaged, and whether padding is."""
    bad: list[PackedChunk] = []
    is_clean = True
    end = 0
    for chunk in section.chunks:
        first = chunk.location.offset - section.start
        is_clean = is_clean and _is_zero(data[end:first])
        end = first + chunk.location.stored_bytes
        if not _is_intact(data[first:end], chunk):
            bad.append(chunk)
    is_clean = is_clean and _is_zero(data[end:])
    return Scrubbed(section, tuple(bad), has_bad_padding=not is_clean)


def _iter_batches(sections: Iterable[PackSection]) -> Iterator[tuple[list[PackSection], int]]:
    left = iter(sections)
    while batch := list(islice(left, _BATCH)):
        yield batch, _BUFFER_BYTES  # the sections of a batch are read one by one into the same buffer


def _is_intact(stored: memoryview, chunk: PackedChunk) -> bool:
    # A delta needs its base, and a codec of a later version cannot be decoded: the fingerprint is of the stored bytes.
    if chunk.location.codec not in WHOLE:
        return fingerprint(stored) == chunk.location.fingerprint
    try:
        return hash_bytes(open_stored(chunk.location, stored, chunk.size_bytes)) == chunk.digest
    except Corrupt:
        return False


def _is_zero(padding: memoryview) -> bool:
    return padding == _ZEROS[: len(padding)]
