"""Reads every byte of packs on all cores and tells which chunks, headers or padding are not as they were written."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from holdfast.digest import hash_bytes
from holdfast.errors import Corrupt, NotFound, StoreError
from holdfast.repo.chunk import UNIT_BYTES
from holdfast.repo.layout import pack_key
from holdfast.repo.pack import PAGE_BYTES, Footer, PackedChunk
from holdfast.store.protocol import ObjectStore

_AHEAD: Final = 32
_BUFFER_BYTES: Final = UNIT_BYTES + 2 * PAGE_BYTES
_ZEROS: Final = bytes(PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a pack that is read at once: whole chunks and the padding before them."""

    pack_id: str
    start: int
    stop: int
    chunks: tuple[PackedChunk, ...]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What reading a stretch has shown."""

    stretch: Stretch
    bad_chunks: tuple[PackedChunk, ...] = ()
    has_bad_padding: bool = False
    error: str = ""
    """The stretch could not be read at all."""


def cut_pack(pack_id: str, footer: Footer, *, data_start: int) -> Iterator[Stretch]:
    """Cut the part of a pack between header and footer into stretches."""
    start = end = data_start
    chunks: list[PackedChunk] = []
    for chunk in footer.chunks:
        stop = chunk.location.offset + chunk.location.stored_bytes
        if chunks and stop - start > UNIT_BYTES:
            yield Stretch(pack_id, start, end, tuple(chunks))
            start, chunks = end, []
        chunks.append(chunk)
        end = stop
    yield Stretch(pack_id, start, footer.footer_offset, tuple(chunks))


class Scrubber:
    """Scrubs stretches on a pool, each thread with one buffer that it reuses."""

    def __init__(self, store: ObjectStore, pool: ThreadPoolExecutor) -> None:
        """Read from `store` on `pool`."""
        self._store = store
        self._pool = pool
        self._local = threading.local()

    def scrub(self, stretches: Iterable[Stretch]) -> Iterator[Scrubbed]:
        """Yield the outcome of each stretch, in order, many being read at once."""
        waiting: deque[Future[Scrubbed]] = deque()
        for stretch in stretches:
            waiting.append(self._pool.submit(self._scrub_one, stretch))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _scrub_one(self, stretch: Stretch) -> Scrubbed:
        data = self._buffer(stretch)
        try:
            self._store.read_into(pack_key(stretch.pack_id), stretch.start, data)
        except (NotFound, Corrupt, StoreError) as error:
            return Scrubbed(stretch, stretch.chunks, error=str(error))
        bad: list[PackedChunk] = []
        is_clean = True
        end = 0
        for chunk in stretch.chunks:
            first = chunk.location.offset - stretch.start
            is_clean = is_clean and _is_zero(data[end:first])
            end = first + chunk.location.stored_bytes
            if hash_bytes(data[first:end]) != chunk.digest:
                bad.append(chunk)
        is_clean = is_clean and _is_zero(data[end:])
        return Scrubbed(stretch, tuple(bad), has_bad_padding=not is_clean)

    def _buffer(self, stretch: Stretch) -> memoryview:
        """Return memory that lies on its pages as the stretch does on those of the file.

        Where it lies a few bytes further on, as the memory of a bytearray does, processors whose `rep movsb` is slow
        for such copies take five times as long to copy from the page cache.
        """
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        held: memoryview = self._local.buffer
        first = stretch.start % PAGE_BYTES
        size = stretch.stop - stretch.start
        return held[first : first + size] if first + size <= len(held) else memoryview(bytearray(size))


def _is_zero(padding: memoryview) -> bool:
    return padding == _ZEROS[: len(padding)]
