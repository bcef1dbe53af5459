"""Small repositories in memory, and ways to look at and to damage them, for the tests of the repository layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import TypedDict

import numpy as np
from typing_extensions import Unpack

from holdfast.digest import Buffer, Digest, fingerprint, hash_bytes
from holdfast.errors import StoreError
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.chunk import RAW, ChunkRef, Location
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import (
    PACKS,
    SHELVES,
    SNAPSHOTS,
    escape_name,
    find_shelf,
    generation_key,
    snapshot_stem,
)
from holdfast.repo.format.pack import HEADER, Footer, NewChunk, PackBuilder, PackedChunk
from holdfast.repo.format.source import BytesSource
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import CommittedSnapshot, read_snapshot
from holdfast.repo.read.reader import SnapshotReader
from holdfast.repo.upkeep.check import Finding
from holdfast.repo.write.writer import Request, SaveResult, WriteOptions, save
from holdfast.testing.faults import FaultyStore

MIB = 1 << 20
PACK_ID = f"{'0' * 24}-{'0' * 16}"


class Options(TypedDict, total=False):
    """What tests pass to `WriteOptions`."""

    metadata: Mapping[str, Json]
    environment: Mapping[str, Json]
    overwrite: bool
    verify_reuse: bool


def new_repo(store: ObjectStore | None = None) -> Repository:
    return open_repository(MemoryStore() if store is None else store, create=True)


def save_bytes(
    repo: Repository, name: str, entries: Mapping[str, Buffer], spec: Json = None, **options: Unpack[Options]
) -> SaveResult:
    sources = [BytesSource(entry, data) for entry, data in entries.items()]
    return save(repo, Request(name, sources, spec, options=WriteOptions(**options)))


def load_bytes(repo: Repository, name: str) -> dict[str, bytes]:
    with SnapshotReader(repo, read_snapshot(repo.store, name)) as reader:
        return {entry: bytes(reader.read_entry(entry)) for entry in reader.manifest.names}


def read_entries(repo: Repository, name: str) -> dict[str, Entry]:
    with SnapshotReader(repo, read_snapshot(repo.store, name)) as reader:
        return {entry.name: entry for entry in reader.manifest.iter_entries()}


def noise(size_bytes: int, seed: int = 0) -> bytes:
    """Return bytes that nothing else holds, the same for the same seed."""
    return np.random.default_rng(seed).bytes(size_bytes)


def keys(store: ObjectStore, prefix: str) -> list[str]:
    return [info.key for info in store.list(prefix)]


def record_key(name: str, generation: int = 0) -> str:
    """Return the key of a snapshot's record."""
    return generation_key(snapshot_stem(name), generation)


def misplaced_keys(name: str) -> list[str]:
    """Return where a snapshot's record does not belong: another shelf, no shelf, and what is no shelf at all."""
    wrong = next(shelf for shelf in SHELVES if shelf != find_shelf(name))
    return [generation_key(place + escape_name(name), 0) for place in (wrong, SNAPSHOTS, SNAPSHOTS + "ff/")]


def stored_bytes(store: ObjectStore) -> int:
    return sum(info.size_bytes for info in store.list("", limit=1_000_000))


def replace_object(store: ObjectStore, key: str, data: bytes) -> None:
    store.delete(key)
    store.create(key, data)


def flip(data: bytes, position: int, bit: int = 0) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return bytes(changed)


def rot(store: ObjectStore, key: str, position: int) -> None:
    """Flip one bit of an object."""
    replace_object(store, key, flip(store.read(key, limit_bytes=1 << 40), position))


def pack_of(repo: Repository, name: str, entry: str) -> Location:
    """Return the location of the first chunk of an entry."""
    location = read_entries(repo, name)[entry].chunks[0].location
    assert location is not None
    return location


def only_pack(store: ObjectStore) -> str:
    """Return the key of the one pack."""
    (key,) = keys(store, PACKS)
    return key


def append_run(pack: PackBuilder, chunks: Sequence[tuple[Digest, memoryview]], *, alignment: int) -> list[Location]:
    """Append adjacent chunks, the first of them aligned."""
    alignments = chain([alignment], repeat(1))
    return pack.append_chunks([NewChunk(*chunk, next(alignments)) for chunk in chunks])


def packed(data: bytes, *, pack_id: str = PACK_ID, offset: int = 64) -> PackedChunk:
    return PackedChunk(hash_bytes(data), len(data), Location(pack_id, offset, len(data), RAW, fingerprint(data)))


def placed(digest: bytes, *, pack_id: str = PACK_ID, offset: int = 64, size_bytes: int = 1000) -> PackedChunk:
    """Return a row for a digest of your choice."""
    return PackedChunk(Digest(digest), size_bytes, Location(pack_id, offset, size_bytes, RAW, bytes(16)))


def iter_gaps(footer: Footer) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of each stretch of padding in a pack; it must be zero."""
    end = HEADER.size
    for chunk in footer.chunks:
        if chunk.location.offset > end:
            yield end, chunk.location.offset
        end = chunk.location.offset + chunk.location.stored_bytes
    if footer.footer_offset > end:
        yield end, footer.footer_offset


def inline_ref(data: bytes, *, box: tuple[int, ...] = ()) -> ChunkRef:
    return ChunkRef(hash_bytes(data), len(data), None, data, box)


def packed_ref(data: bytes, *, offset: int = 64, box: tuple[int, ...] = ()) -> ChunkRef:
    return ChunkRef(hash_bytes(data), len(data), packed(data, offset=offset).location)._replace(box=box)


def codes(findings: Sequence[Finding]) -> Counter[str]:
    return Counter(finding.code for finding in findings)


def snapshot_of(repo: Repository, name: str) -> CommittedSnapshot:
    return read_snapshot(repo.store, name)


class Watched(FaultyStore):
    """Forwards everything, counts reads, and fails reads of the given keys."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.inner = inner
        self.reads: list[tuple[str, int, int]] = []
        self.failing: set[str] = set()

    def _meet(self, key: str, start: int, size: int) -> None:
        with self._lock:
            self.reads.append((key, start, size))
        if key in self.failing:
            raise StoreError(f"input/output error on {key}", key=key)

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        self._meet(key, 0, -1)
        return super().read(key, limit_bytes=limit_bytes)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self._meet(key, start, buffer.nbytes)
        super().read_into(key, start, buffer)


class Meanwhile(Watched):
    """Lets something happen once, just after the first object below `prefix` was created."""

    def __init__(self, inner: ObjectStore, prefix: str, act: Callable[[], object]) -> None:
        super().__init__(inner)
        self.act_after(prefix, act)

    def act_after(self, prefix: str, act: Callable[[], object]) -> None:
        self._prefix = prefix
        self._act: Callable[[], object] | None = act

    def create(self, key: str, data: Buffer, *, durable: bool = True) -> None:
        super().create(key, data, durable=durable)
        if self._act and key.startswith(self._prefix):
            act, self._act = self._act, None
            act()
