"""Verified reads: exact ranges of entries into the caller's buffer, from the hint or from any other intact copy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

from holdfast.digest import fingerprint, hash_bytes, short_hex
from holdfast.errors import Corrupt, DigestMismatch, MissingChunk, NewerFormat, NotFound, StoreError
from holdfast.repo.chunk import RAW, UNIT_BYTES, ChunkRef, Location, verify_chunk
from holdfast.repo.copies import Copies
from holdfast.repo.layout import pack_key
from holdfast.repo.manifest import Entry, Manifest, read_manifest
from holdfast.repo.repository import Repository, count_threads
from holdfast.repo.snapshots import Snapshot, read_name
from holdfast.store.protocol import MappableStore

Verify = Literal["full", "fast", False]
"""What proves bytes: BLAKE3 of each chunk; XXH3 of what is stored, which finds accidents only; nothing."""

_FOLLOWS: Final = 8
"""How often a snapshot that keeps being repacked is followed before it counts as gone."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A chunk and where it stands in its entry."""

    ref: ChunkRef
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.ref.size_bytes


class SnapshotReader:
    """Reads entries of one snapshot; every byte it returns has been verified. Use it in a `with`."""

    def __init__(self, repo: Repository, snapshot: Snapshot, *, verify: Verify = "full") -> None:
        """Read the manifest; raises NotFound if the snapshot has been collected, Corrupt if it is damaged."""
        self._verify: Verify = verify
        self.snapshot = snapshot
        self.manifest = read_manifest(repo.store, snapshot.manifest)
        self._copies = Copies(repo)
        self._successor = _Successor(repo, snapshot)
        self._store = repo.store
        self.counters = repo.counters
        self._threads = ThreadPoolExecutor(count_threads(), "holdfast-read")
        self._pid = os.getpid()

    @property
    def _pool(self) -> ThreadPoolExecutor:
        # A forked child has none of the threads, and a pool does not notice.
        if os.getpid() != self._pid:
            self._threads = ThreadPoolExecutor(count_threads(), "holdfast-read")
            self._pid = os.getpid()
        return self._threads

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def find_entry(self, name: str) -> Entry:
        """Return the entry of that name, or raise NotFound that helps."""
        try:
            return self.manifest.find_entry(name)
        except NotFound:
            raise NotFound(
                f"no entry {name!r} in {self.snapshot.name!r}; `holdfast show {self.snapshot.name}` lists them",
                name=name,
            ) from None

    def read_entry(self, name: str) -> bytearray:
        """Read a whole entry into new memory."""
        entry = self.find_entry(name)
        data = bytearray(entry.size_bytes)
        self.read_into(entry, 0, memoryview(data))
        return data

    def read_into(self, entry: Entry, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `entry` from `start` on; reads only the chunks that these lie in."""
        buffer = buffer.cast("B")
        stop = start + buffer.nbytes
        if start < 0 or stop > entry.size_bytes:
            raise ValueError(f"bytes {start} to {stop} of {entry.name!r}, which has {entry.size_bytes}")
        slots = [slot for slot in _place(entry) if max(slot.start, start) < min(slot.stop, stop)]
        whole = [slot for slot in slots if start <= slot.start and slot.stop <= stop]
        tasks = [self._pool.submit(self._read_run, entry, run, buffer, start) for run in _split_runs(whole)]
        try:
            for slot in slots:
                if not (start <= slot.start and slot.stop <= stop):
                    first, last = max(slot.start, start), min(slot.stop, stop)
                    data = self._read_chunk(entry, slot)
                    buffer[first - start : last - start] = data[first - slot.start : last - slot.start]
            for task in tasks:
                task.result()
        finally:
            # After an error, too: nobody may write into the caller's buffer once this has returned.
            for task in tasks:
                task.cancel()
            wait(tasks)

    def read_all(self, wanted: Sequence[tuple[Entry, memoryview]]) -> None:
        """Fill a buffer with each of these entries, all at once; whatever happens, nothing is written afterwards."""
        runs = [
            (entry, run, buffer) for entry, buffer in wanted for run in _split_runs(_place(entry)) if entry.size_bytes
        ]
        tasks = [self._pool.submit(self._read_batch, batch) for batch in _group_runs(runs)]
        try:
            for task in tasks:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            wait(tasks)

    def _read_batch(self, batch: Sequence[tuple[Entry, Sequence[_Slot], memoryview]]) -> None:
        for entry, run, buffer in batch:
            self._read_run(entry, run, buffer, 0)

    def map_entry(self, entry: Entry) -> memoryview | None:
        """Return an entry as private memory over its pack, unverified; None if it does not lie there in one piece."""
        runs = _split_runs(_place(entry), limit_bytes=entry.size_bytes)
        first = runs[0][0].ref.location if len(runs) == 1 else None
        if first is None or first.codec != RAW or not isinstance(self._store, MappableStore):
            return None
        try:
            return self._store.map(pack_key(first.pack_id), first.offset, entry.size_bytes)
        except (NotFound, Corrupt, StoreError):
            return None  # reading it finds another copy, or says what is wrong

    def iter_entry(self, entry: Entry) -> Iterator[memoryview]:
        """Yield an entry piece by piece, never holding more than a few pieces, whatever its size."""
        for start in range(0, entry.size_bytes, UNIT_BYTES):
            piece = memoryview(bytearray(min(UNIT_BYTES, entry.size_bytes - start)))
            self.read_into(entry, start, piece)
            yield piece

    def read_chunk(self, entry: Entry, position: int) -> memoryview:
        """Read one chunk of an entry, by its position among them."""
        start = sum(ref.size_bytes for ref in entry.chunks[:position])
        return self._read_chunk(entry, _Slot(entry.chunks[position], start))

    def _read_run(self, entry: Entry, run: Sequence[_Slot], buffer: memoryview, start: int) -> None:
        """Read chunks that lie back to back in one pack, straight into the buffer."""
        target = buffer[run[0].start - start : run[-1].stop - start]
        first = run[0].ref.location
        if first is not None and first.codec == RAW and first.stored_bytes == run[0].ref.size_bytes:
            try:
                self._store.read_into(pack_key(first.pack_id), first.offset, target)
            except (NotFound, Corrupt, StoreError):
                self._read_singly(entry, run, target)
                return
            self._verify_run(entry, run, target)
        else:
            self._read_singly(entry, run, target)

    def _verify_run(self, entry: Entry, run: Sequence[_Slot], target: memoryview) -> None:
        for slot in run:
            part = target[slot.start - run[0].start : slot.stop - run[0].start]
            if not self._is_proven(part, slot.ref):
                part[:] = self._read_chunk(entry, slot)

    def _is_proven(self, data: memoryview, ref: ChunkRef) -> bool:
        if self._verify == "full" or ref.location is None:
            return hash_bytes(data) == ref.digest
        return self._verify is False or fingerprint(data) == ref.location.fingerprint

    def _read_singly(self, entry: Entry, run: Sequence[_Slot], target: memoryview) -> None:
        for slot in run:
            target[slot.start - run[0].start : slot.stop - run[0].start] = self._read_chunk(entry, slot)

    def _read_chunk(self, entry: Entry, slot: _Slot) -> memoryview:
        """Read one chunk from wherever an intact copy is left."""
        ref = slot.ref
        what = self._describe(entry, slot)
        if ref.location is None:
            data = memoryview(ref.inline)
            verify_chunk(data, ref.digest, what=f"{what}, inline in its manifest")
            return data
        try:
            return self._read_copy(ref, ref.location, what)
        except (NotFound, Corrupt, NewerFormat, StoreError) as error:
            # A hint is only a hint. Other snapshots, or repairs, may have left another copy.
            for location in self._copies.iter_copies(ref):
                try:
                    return self._read_copy(ref, location, what)
                except (NotFound, Corrupt, NewerFormat, StoreError):
                    continue
            if isinstance(error, NewerFormat):
                raise
            # Before it counts as lost: the snapshot may have been deleted or repacked, and its packs collected.
            for location in self._successor.iter_places(entry, ref):
                try:
                    return self._read_copy(ref, location, what)
                except (NotFound, Corrupt, StoreError):
                    continue
            raise self._lost(error, what, ref.location) from error

    def _read_copy(self, ref: ChunkRef, location: Location, what: str) -> memoryview:
        key = pack_key(location.pack_id)
        if location.codec != RAW:
            raise NewerFormat(
                f"{what} is stored with codec {location.codec}, which this Holdfast does not know: upgrade"
            )
        if location.stored_bytes != ref.size_bytes:
            raise Corrupt(f"{what}: {location.stored_bytes} stored bytes cannot hold {ref.size_bytes}", key=key)
        data = memoryview(bytearray(location.stored_bytes))
        self._store.read_into(key, location.offset, data)
        verify_chunk(data, ref.digest, what=f"{what}, pack {location.pack_id}")
        return data

    def _describe(self, entry: Entry, slot: _Slot) -> str:
        chunk = f"chunk {short_hex(slot.ref.digest)} (bytes {slot.start} to {slot.stop})"
        return f"{self.snapshot.name!r}, entry {entry.name!r}, {chunk}"

    def _lost(self, error: Exception, what: str, location: Location) -> Exception:
        """Say what is lost, where it was, and what to do."""
        key = pack_key(location.pack_id)
        advice = "no other intact copy is in the store. Run `holdfast check --read`; restore the pack from a copy"
        if isinstance(error, NotFound):
            return MissingChunk(f"{what}: its pack {location.pack_id} is gone, and {advice}", key=key)
        if isinstance(error, Corrupt):
            return DigestMismatch(f"{what}: damaged in pack {location.pack_id}, and {advice}", key=key)
        return StoreError(f"{what}: pack {location.pack_id} cannot be read ({error}), and {advice}", key=key)


class _Successor:
    """What the name holds now, asked when a chunk is not where it was. Safe in any thread."""

    def __init__(self, repo: Repository, snapshot: Snapshot) -> None:
        self._store = repo.store
        self._snapshot = snapshot
        self._generation = snapshot.generation
        self._manifest: Manifest | None = None
        self._lock = threading.Lock()

    def iter_places(self, entry: Entry, ref: ChunkRef) -> Iterator[Location]:
        """Yield where the snapshot has the chunk since it was repacked; nothing if it was not.

        Raises NotFound if it was deleted or overwritten: then nothing keeps its bytes any more.
        """
        for attempt in range(_FOLLOWS):
            with self._lock:
                # What was learnt for another chunk of a lost pack serves for this one, too.
                is_known = attempt == 0 and self._manifest is not None
                if not is_known and not self._follow():
                    return
                manifest = self._manifest
            if manifest is not None:
                held = manifest.find_entry(entry.name).chunks
                yield from {at: None for other in held if other.digest == ref.digest and (at := other.location)}

    def _follow(self) -> bool:
        """Look at the name again; tell whether it has moved on, its content being the same."""
        try:
            newest = read_name(self._store, self._snapshot.name).snapshot
            if newest and newest.generation == self._generation:
                return False
            if newest and newest.digest == self._snapshot.digest:
                self._generation, self._manifest = newest.generation, None
                self._manifest = read_manifest(self._store, newest.manifest)
                return True
        except NotFound:
            return True  # repacked once more, and collected
        except (Corrupt, NewerFormat, StoreError):
            return False
        raise NotFound(
            f"{self._snapshot.name!r} was deleted or overwritten while it was read, and its bytes were collected;"
            " list again",
            name=self._snapshot.name,
        )


def _place(entry: Entry) -> list[_Slot]:
    if entry.dims:
        raise NewerFormat(f"{entry.name!r} is sharded, which this Holdfast does not read yet: upgrade")
    slots = []
    end = 0
    for ref in entry.chunks:
        slots.append(_Slot(ref, end))
        end += ref.size_bytes
    return slots


def _split_runs(slots: Sequence[_Slot], *, limit_bytes: int = UNIT_BYTES) -> list[list[_Slot]]:
    """Split chunks into runs that one read can fetch: adjacent in the entry and in one pack."""
    runs: list[list[_Slot]] = []
    for slot in slots:
        before = runs[-1][-1] if runs else None
        room = limit_bytes - (slot.stop - runs[-1][0].start) if runs else -1
        if before is None or room < 0 or not _adjoins(before, slot):
            runs.append([])
        runs[-1].append(slot)
    return runs


def _group_runs(
    runs: Sequence[tuple[Entry, list[_Slot], memoryview]],
) -> Iterator[list[tuple[Entry, list[_Slot], memoryview]]]:
    """Yield batches of runs that are worth a thread's while."""
    batch: list[tuple[Entry, list[_Slot], memoryview]] = []
    room = 0
    for item in runs:
        size = item[1][-1].stop - item[1][0].start
        # A small read costs as much as some bytes more.
        room -= size + 4096
        if batch and room < 0:
            yield batch
            batch = []
        if not batch:
            room = UNIT_BYTES - size
        batch.append(item)
    if batch:
        yield batch


def _adjoins(before: _Slot, slot: _Slot) -> bool:
    first, second = before.ref.location, slot.ref.location
    if first is None or second is None or before.stop != slot.start:
        return False
    is_raw = first.codec == second.codec == RAW and first.stored_bytes == before.ref.size_bytes
    return is_raw and first.pack_id == second.pack_id and first.offset + first.stored_bytes == second.offset


def open_snapshot(repo: Repository, snapshot: Snapshot, *, verify: Verify = "full") -> SnapshotReader:
    """Open a snapshot for reading; if it was deleted or overwritten and collected meanwhile, raises NotFound."""
    for _ in range(_FOLLOWS):
        try:
            return SnapshotReader(repo, snapshot, verify=verify)
        except NotFound as error:
            newest = read_name(repo.store, snapshot.name).snapshot
            # A repack changes where the bytes lie, not what they are: what was asked for is still there.
            if newest is None or newest.generation == snapshot.generation or newest.digest != snapshot.digest:
                raise NotFound(
                    f"{snapshot.name!r} is gone: its manifest was collected or lost; list again", name=snapshot.name
                ) from error
            snapshot = newest
    raise NotFound(f"{snapshot.name!r} keeps being repacked while it is opened; try again", name=snapshot.name)


def is_readable(repo: Repository, snapshot: Snapshot) -> bool:
    """Read all of a snapshot and tell whether it is what it was."""
    try:
        with SnapshotReader(repo, snapshot) as reader:
            for entry in reader.manifest.iter_entries():
                for _ in reader.iter_entry(entry):
                    pass
    except (NotFound, Corrupt, StoreError):
        return False
    return True
