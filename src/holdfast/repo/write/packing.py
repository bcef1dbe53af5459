"""Writes the packs of one save, several at a time if the store has to be waited for, within a share of the budget."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from holdfast.errors import NotFound, StoreError
from holdfast.objects.blocks import LentBlock
from holdfast.objects.local.block_io import BLOCK_BYTES
from holdfast.objects.protocol import StoreTraits
from holdfast.objects.thread_pool import Task, ThreadPool
from holdfast.repo.format.chunk import RAW, UNIT_BYTES, Location
from holdfast.repo.format.layout import new_file_id, pack_key
from holdfast.repo.format.pack import PACK_LIMIT_BYTES, PAGE_BYTES, NewChunk, PackBuilder, PackedChunk
from holdfast.repo.handle.compression import Speeds
from holdfast.repo.handle.index import ChunkIndex
from holdfast.repo.handle.repository import VerifiedChunks
from holdfast.repo.names.leases import KeptAlive

_FEWEST_PACKS: Final = 3
"""How many packs the uploads have room for at least: one that is being filled and two that are being sent."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The bytes that each part of a save may have in memory."""

    hash_bytes: int
    """For chunks that are being read and hashed."""
    batch_bytes: int
    """The size of a batch of chunks that are hashed together."""
    staged_bytes: int
    """The size from which on a batch of new chunks is copied into a block, hashed there and written from there."""
    huge_pages: bool = True
    """Whether these blocks are in huge pages. Not if there are so many that the system has to move memory for them."""
    pack_bytes: int | None = None
    """The size at which a pack is complete; None for that of the format."""
    packs_in_flight: int = 0
    """How many packs are sent at a time, while the next is being filled; 0 if each is written while it is filled."""


def plan_shares(traits: StoreTraits, budget_bytes: int) -> Shares:
    """Return the shares of a save: half for hashing, or three quarters for uploads that the store keeps in memory."""
    batch_bytes = min(UNIT_BYTES, budget_bytes // 8)
    if traits.upload_bytes is None:
        return Shares(budget_bytes // 2, batch_bytes, BLOCK_BYTES)
    room = budget_bytes * 3 // 4
    whole = min(traits.upload_bytes, room // _FEWEST_PACKS)
    # A pack is complete before a further batch could make it larger than `whole`.
    return Shares(
        hash_bytes=budget_bytes - room,
        batch_bytes=batch_bytes // 2,
        # Of a block that the store keeps until the pack is sent, at most a quarter is unused.
        staged_bytes=batch_bytes // 2 * 3 // 4,
        huge_pages=False,
        pack_bytes=max(whole - batch_bytes // 2, 1),
        packs_in_flight=min(room // whole - 1, traits.requests_at_once),
    )


_log = logging.getLogger(__name__)

_RECENT_BYTES: Final = 32 << 20
"""Of a store that writes a pack while it is filled, the speed is measured again after so many bytes."""


class Packer:
    """The packs of one save; used by one thread."""

    def __init__(
        self,
        index: ChunkIndex,
        lease: KeptAlive,
        shares: Shares,
        *,
        proven: VerifiedChunks | None = None,
        speeds: Speeds | None = None,
        declare_codec: Callable[[int], object] = bool,
    ) -> None:
        """Write packs to the store of `index` under `lease`, the first one when a chunk is appended.

        Packs that are durable are added to `proven`, unless the store proves what it keeps; how long they took, to
        `speeds`. `declare_codec` is called before the first chunk of each codec: it makes older versions refuse the
        store.
        """
        self._store = index.store
        self._index = index
        self._lease = lease
        self._pack_bytes = shares.pack_bytes
        self._proven = None if self._store.traits.checked_uploads else proven
        self._speeds = speeds or Speeds()
        self._declare_codec = declare_codec
        self._declared = {RAW}
        self._sending = PacksInFlight(shares.packs_in_flight)
        self._write_s = 0.0
        self._recent_bytes, self._recent_s = 0, 0.0
        self._open: PackBuilder | None = None
        self._unindexed: list[PackedChunk] = []
        self._unindexed_bytes = 0

    def append(self, chunks: Sequence[NewChunk], *, block: LentBlock | None = None) -> list[Location]:
        """Append chunks, to a new pack if the open one is full; return their locations. See `append_chunks`."""
        self.keep_alive()
        for codec in {chunk.codec for chunk in chunks} - self._declared:
            # Durable before any pack or manifest that needs it is visible.
            self._declare_codec(codec)
            self._declared.add(codec)
        if self._open is not None and self._open.is_full:
            pack, self._open = self._open, None
            self._note_durable(self._sending.send(self._time(pack)))
            # As often as with packs of full size: fragments have to be merged later.
            if self._unindexed_bytes >= PACK_LIMIT_BYTES:
                self.write_index()
        if self._open is None:
            pack_id = new_file_id(self._lease.lease_id)
            self._open = PackBuilder(self._store, pack_id, limit_bytes=self._pack_bytes)
            # A run that continues in a new pack starts there, so it needs the alignment of a start.
            if chunks[0].alignment == 1:
                chunks = [chunks[0]._replace(alignment=PAGE_BYTES), *chunks[1:]]
        started, before = perf_counter(), self._open.size_bytes
        locations = self._open.append_chunks(chunks, block=block)
        self._note_written(self._open.size_bytes - before, perf_counter() - started)
        return locations

    def _note_written(self, size_bytes: int, seconds: float) -> None:
        """Note how long the store took for bytes of the open pack; now and then, if they are written at once."""
        self._write_s += seconds
        self._recent_bytes, self._recent_s = self._recent_bytes + size_bytes, self._recent_s + seconds
        if self._recent_bytes >= _RECENT_BYTES:
            if not self._sending.limit:
                self._speeds.note_stored(self._recent_bytes, self._recent_s)
            self._recent_bytes, self._recent_s = 0, 0.0

    def _time(self, pack: PackBuilder) -> TimedPack:
        """Return a full pack to be sent; takes with it the time that its appends have taken."""
        write_s, self._write_s = self._write_s, 0.0
        return TimedPack(pack, self._speeds, write_s, at_once=max(self._sending.limit, 1))

    def keep_alive(self) -> None:
        """Renew the lease if it is due. Call it even while nothing is appended: hashing and lookups take long."""
        self._lease.keep_alive()

    def seal(self) -> None:
        """Make all packs durable; `write_index` then adds them to the index."""
        if self._open is not None:
            pack, self._open = self._open, None
            # On this thread: nothing is left to be done meanwhile.
            self._note_durable(self._sending.seal_here(self._time(pack)))
        self._note_durable(self._sending.wait())

    def write_index(self) -> None:
        """Add durable packs to the index; a failure is only logged, because the index is a cache."""
        rows, self._unindexed, self._unindexed_bytes = self._unindexed, [], 0
        if not rows:
            return
        try:
            # Before the commit: if this save dies, the next one need not write these bytes again.
            self._index.write(rows)
        except StoreError as error:
            _log.warning("packs were not added to the index; their chunks may be stored twice: %s", error)

    def abort(self) -> None:
        """Drop the open pack and those that are being sent; a collector deletes the others."""
        if self._open is not None:
            self._open.abort()
            self._open = None
        self._sending.abort()

    def _note_durable(self, packs: Sequence[PackBuilder]) -> None:
        for pack in packs:
            self._unindexed += pack.rows
            self._unindexed_bytes += pack.size_bytes
            self._note_proven(pack.pack_id)

    def _note_proven(self, pack_id: str) -> None:
        if self._proven is None:
            return
        with suppress(StoreError, NotFound):  # the next save then reads the pack before it reuses a chunk
            # Only now: committing the upload gives the file its name, which changes its version (ctime).
            self._proven.add_pack(pack_id, version=self._store.stat(pack_key(pack_id)).version)


class TimedPack:
    """A full pack, and how long the store takes for it."""

    def __init__(self, pack: PackBuilder, speeds: Speeds, write_s: float, *, at_once: int) -> None:
        """Add what `seal` takes, and `write_s` before it, to `speeds`; the store takes `at_once` packs at a time."""
        self.pack = pack
        self._speeds = speeds
        self._write_s = write_s
        self._at_once = at_once

    def seal(self) -> int:
        """Seal the pack, as `PackBuilder.seal`."""
        started = perf_counter()
        size_bytes = self.pack.seal()
        # A pack that shares the link with others takes longer by as much. If it is alone, the store could do more.
        seconds = self._write_s + perf_counter() - started
        self._speeds.note_stored(size_bytes, seconds / self._at_once)
        return size_bytes


class PacksInFlight:
    """Packs that are sent to the store on threads of their own, while the caller fills the next; for one thread."""

    def __init__(self, limit: int) -> None:
        """Send at most `limit` packs at a time; with 0, each is sealed on the caller's thread."""
        self.limit = limit
        self._pool: ThreadPool | None = None
        self._waiting: deque[tuple[PackBuilder, Task[int]]] = deque()

    def send(self, timed: TimedPack) -> list[PackBuilder]:
        """Begin to seal a pack, after waiting for room; return packs that are durable now. Raises their errors."""
        if not self.limit:
            return self.seal_here(timed)
        pack = timed.pack
        durable = []
        try:
            while len(self._waiting) >= self.limit:
                durable.append(self._take_first())
        except BaseException:
            pack.abort()
            raise
        self._pool = self._pool or ThreadPool("holdfast-upload", self.limit)
        # In the list before it can start: an interrupt at any point must find it there.
        self._waiting.append((pack, Task(self._pool, timed.seal)))
        self._pool.enqueue(self._waiting[-1][1])
        return durable

    def seal_here(self, timed: TimedPack) -> list[PackBuilder]:
        """Seal a pack on this thread and return it."""
        try:
            timed.seal()
        except BaseException:
            timed.pack.abort()
            raise
        return [timed.pack]

    def wait(self) -> list[PackBuilder]:
        """Return all packs that were being sent, when they are durable; raises the error of the first that failed."""
        durable = [self._take_first() for _ in range(len(self._waiting))]
        self._stop()
        return durable

    def abort(self) -> None:
        """Drop packs whose sending has not begun, and wait for the others to end."""
        while self._waiting:
            pack, task = self._waiting[-1]
            task.abandon()
            pack.abort()
            self._waiting.pop()
        self._stop()

    def _take_first(self) -> PackBuilder:
        """Return the first pack when it is durable; if the wait is interrupted, it stays in the list."""
        pack, task = self._waiting[0]
        task.wait()
        self._waiting.popleft()
        try:
            task.result()
        except BaseException:
            pack.abort()
            raise
        return pack

    def _stop(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.shutdown()
