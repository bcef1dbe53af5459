"""Reads one chunk from the stated location or any other intact copy, and describes what is lost if there is none."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

from holdfast.digest import Digest, hash_bytes, short_hex
from holdfast.errors import Corrupt, DigestMismatch, MissingChunk, NewerFormat, NotFound, SnapshotGone, StoreError
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.chunk import DELTA, RAW, Base, ChunkRef, Location, verify_chunk, verify_location
from holdfast.repo.format.codec import find_base_digest, open_delta, open_stored
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import PACKS, pack_key
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.pack import Footer, PackedChunk, iter_pack_footers, parse_pack_key
from holdfast.repo.format.rank_manifests import read_view
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.snapshots import CommittedSnapshot, read_name

ROW_COST_BYTES: Final = 400
"""Approximate memory of one row of a footer."""


class Copies:
    """Finds other copies of chunks; keeps what it has read, as a lost pack takes many chunks. Safe in any thread."""

    def __init__(self, repo: Repository) -> None:
        """Search `repo`; nothing is read before the first search."""
        self._store = repo.store
        self._limit_bytes = repo.budget_bytes // 4
        self._lock = threading.Lock()
        self._index = repo.index
        self._is_refreshed = False
        self._in_footers: dict[Digest, list[PackedChunk]] | None = None

    def iter_copies(self, ref: ChunkRef) -> Iterator[Location]:
        """Yield every other location where a copy of the chunk may be stored, the cheapest to find first."""
        seen = {ref.location}
        for find in (self._find_in_index, self._find_in_footers):
            for location in find(ref):
                if location not in seen:
                    seen.add(location)
                    yield location

    def _find_in_index(self, ref: ChunkRef) -> list[Location]:
        with self._lock:
            if not self._is_refreshed:
                self._index.refresh()
                self._is_refreshed = True
            return self._index.find(ref.digest, ref.size_bytes)

    def _find_in_footers(self, ref: ChunkRef) -> list[Location]:
        with self._lock:
            if self._in_footers is None:
                self._in_footers = self._read_footers()
            found = self._in_footers.get(ref.digest, ())
        if not found and len(self._in_footers) * ROW_COST_BYTES >= self._limit_bytes:
            # Not all footers fit in memory: read them again, for this chunk only.
            found = [
                row for _, footer in iter_footers(self._store) for row in footer.chunks if row.digest == ref.digest
            ]
        return [row.location for row in found if row.size_bytes == ref.size_bytes]

    def _read_footers(self) -> dict[Digest, list[PackedChunk]]:
        rows: dict[Digest, list[PackedChunk]] = {}
        for _, footer in iter_footers(self._store):
            for row in footer.chunks:
                if len(rows) * ROW_COST_BYTES < self._limit_bytes:
                    rows.setdefault(row.digest, []).append(row)
        return rows


def iter_footers(store: ObjectStore) -> Iterator[tuple[str, Footer]]:
    """Yield the id and footer of every pack whose footer can be read."""
    listed = ((parse_pack_key(info.key), info.size_bytes) for info in store.iter_objects(PACKS))
    packs = [(pack_id, size_bytes) for pack_id, size_bytes in listed if pack_id]
    for (pack_id, _), footer in zip(packs, iter_pack_footers(store, packs), strict=True):
        if isinstance(footer, Footer):
            yield pack_id, footer
        elif not isinstance(footer, NotFound | Corrupt | NewerFormat | StoreError):
            raise footer


FOLLOWS: Final = 8
"""How often a snapshot that was repacked is opened again before the read fails."""


class StoredChunk(NamedTuple):
    """A chunk that was read and verified: its bytes, and the bytes that are stored for it."""

    raw: memoryview
    stored: memoryview
    codec: int


class _LostBase(Corrupt):
    """The base of a delta has no intact copy; the cause is the error of its last copy."""


def read_stated_base(store: ObjectStore, base: Base, size_bytes: int) -> memoryview | None:
    """Return the bytes of a base at its stated location; None if they do not have its digest.

    Raises NotFound, Corrupt or StoreError if they cannot be read.
    """
    stored = memoryview(bytearray(base.location.stored_bytes))
    store.read_into(pack_key(base.location.pack_id), base.location.offset, stored)
    raw = open_stored(base.location, stored, size_bytes)
    return raw if hash_bytes(raw) == base.digest else None


class AnyCopy:
    """Reads single chunks of one snapshot. Safe in any thread."""

    def __init__(self, repo: Repository, snapshot: CommittedSnapshot) -> None:
        """Read chunks of `snapshot`; nothing is read yet."""
        self._store = repo.store
        self._name = snapshot.name
        self._copies = Copies(repo)
        self._successor = _Successor(repo, snapshot)

    def read(self, entry: Entry, ref: ChunkRef, start: int) -> StoredChunk:
        """Read one chunk, which begins at byte `start` of its entry, from any intact copy."""
        if ref.location is None and hash_bytes(ref.inline) == ref.digest:
            data = memoryview(ref.inline)  # before building the error text: there may be millions of inline chunks
            return StoredChunk(data, data, RAW)
        chunk = f"chunk {short_hex(ref.digest)} (bytes {start} to {start + ref.size_bytes})"
        what = f"{self._name!r}, entry {entry.name!r}, {chunk}"
        if ref.location is None:
            data = memoryview(ref.inline)
            verify_chunk(data, ref.digest, what=f"{what}, inline in its manifest")
            return StoredChunk(data, data, RAW)
        try:
            return self._read_copy(ref, ref.location, what)
        except (NotFound, Corrupt, NewerFormat, StoreError) as error:
            # The location in a manifest is only a hint. Other snapshots or repairs may have written another copy.
            for location in self._copies.iter_copies(ref):
                try:
                    return self._read_copy(ref, location, what)
                except (NotFound, Corrupt, NewerFormat, StoreError):
                    continue
            if isinstance(error, NewerFormat):
                raise
            # Before reporting a loss: the snapshot may have been deleted or repacked, and its packs collected.
            for location in self._successor.iter_locations(entry, ref):
                try:
                    return self._read_copy(ref, location, what)
                except (NotFound, Corrupt, StoreError):
                    continue
            raise _describe_loss(error, what, ref.location) from error

    def read_base(self, entry: Entry, base: ChunkRef) -> StoredChunk:
        """Read the base of a delta from any intact copy that is no delta itself; raises Corrupt if there is none."""
        what = f"{self._name!r}, entry {entry.name!r}, base {short_hex(base.digest)} of a delta"
        return self._read_whole(base, what)

    def _read_copy(self, ref: ChunkRef, location: Location, what: str) -> StoredChunk:
        key = pack_key(location.pack_id)
        verify_location(location, ref.size_bytes, what=what, key=key)
        stored = memoryview(bytearray(location.stored_bytes))
        self._store.read_into(key, location.offset, stored)
        if location.codec == DELTA:
            raw = open_delta(location, stored, self._read_base(ref, location, stored, what))
        else:
            raw = open_stored(location, stored, ref.size_bytes)
        chunk = StoredChunk(raw, stored, location.codec)
        verify_chunk(chunk.raw, ref.digest, what=f"{what}, pack {location.pack_id}")
        return chunk

    def _read_base(self, ref: ChunkRef, location: Location, stored: memoryview, what: str) -> memoryview:
        """Return the base of a delta, from any intact copy that is no delta itself; raises Corrupt if there is none."""
        digest = find_base_digest(stored)
        stated = location.base.location if location.base and location.base.digest == digest else None
        return self._read_whole(ChunkRef(digest, ref.size_bytes, stated), f"{what}, its base {short_hex(digest)}").raw

    def _read_whole(self, base: ChunkRef, what: str) -> StoredChunk:
        error: Exception = NotFound("no pack has it")
        key = ""
        stated = [] if base.location is None else [base.location]
        for at in itertools.chain(stated, self._copies.iter_copies(base)):
            if at.codec == DELTA:
                continue
            try:
                return self._read_copy(base, at, what)
            except (NotFound, Corrupt, NewerFormat, StoreError) as last:
                # The stated copy is what a repair needs to know.
                error, key = (error, key) if key else (last, pack_key(at.pack_id))
        raise _LostBase(f"its base {short_hex(base.digest)}", key=key) from error


def _describe_loss(error: Exception, what: str, location: Location) -> Exception:
    """Return the error for a chunk that has no intact copy: what is lost, where it was, and what to do."""
    key = pack_key(location.pack_id)
    advice = "no other intact copy is in the store. Run `holdfast check --read`; restore the pack from a copy"
    if isinstance(error, _LostBase):
        is_gone = isinstance(error.__cause__, NotFound)
        state = "gone" if is_gone else "damaged"
        kind = MissingChunk if is_gone else DigestMismatch
        place = f" in {error.key}" if error.key else ""
        text = f"{what} is a delta: {error}, which it is the difference from, is {state}{place}, and {advice}"
        return kind(text, key=error.key)
    if isinstance(error, NotFound):
        return MissingChunk(f"{what}: its pack {location.pack_id} is gone, and {advice}", key=key)
    if isinstance(error, Corrupt):
        return DigestMismatch(f"{what}: damaged in pack {location.pack_id}, and {advice}", key=key)
    return StoreError(f"{what}: pack {location.pack_id} cannot be read ({error}), and {advice}", key=key)


class _Successor:
    """Finds chunks of a snapshot that was repacked while it is being read. Safe in any thread."""

    def __init__(self, repo: Repository, snapshot: CommittedSnapshot) -> None:
        self._store = repo.store
        self._snapshot = snapshot
        self._generation = snapshot.generation
        self._manifest: Manifest | None = None
        self._lock = threading.Lock()

    def iter_locations(self, entry: Entry, ref: ChunkRef) -> Iterator[Location]:
        """Yield the chunk's locations in later generations of the name; nothing if it was not repacked.

        Raises SnapshotGone if the snapshot was deleted or overwritten: its bytes may then be collected.
        """
        for attempt in range(FOLLOWS):
            with self._lock:
                # First the manifest that was read for another chunk: a lost pack takes many chunks with it.
                is_known = attempt == 0 and self._manifest is not None
                if not is_known and not self._follow():
                    return
                manifest = self._manifest
            if manifest is not None:
                chunks = manifest.find_entry(entry.name).chunks
                yield from {at: None for other in chunks if other.digest == ref.digest and (at := other.location)}

    def _follow(self) -> bool:
        """Read the name again; return whether it has a later generation with the same content."""
        try:
            newest = read_name(self._store, self._snapshot.name).snapshot
            if newest and newest.generation == self._generation:
                return False
            if newest and newest.digest == self._snapshot.digest:
                self._generation, self._manifest = newest.generation, None
                self._manifest = read_view(self._store, newest.manifest)
                return True
        except NotFound:
            return True  # repacked again, and this manifest was collected: the next attempt reads a later one
        except (Corrupt, NewerFormat, StoreError):
            return False
        raise SnapshotGone(
            f"{self._snapshot.name!r} was deleted or overwritten while it was read, and its bytes were collected;"
            " list the snapshots again",
            name=self._snapshot.name,
        )
