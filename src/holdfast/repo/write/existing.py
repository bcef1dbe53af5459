"""Finds stored copies of chunks that a save may reuse, and checks that they are intact."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from holdfast.digest import DIGEST_BYTES, Buffer, Digest, fingerprint, hash_bytes
from holdfast.errors import Corrupt, NewerFormat, NotFound, StoreError
from holdfast.objects.blocks import BlockPool
from holdfast.objects.protocol import PAGE_LIMIT, ObjectInfo, ObjectStore
from holdfast.repo.format.chunk import CHUNK_BYTES, DELTA, Base, Location, has_possible_size, iter_places
from holdfast.repo.format.codec import find_base_digest, open_delta, open_stored
from holdfast.repo.format.layout import (
    SNAPSHOTS,
    may_start_with,
    natural_order,
    pack_key,
    split_generation,
    split_prefix,
    split_stem,
)
from holdfast.repo.format.manifest import Manifest
from holdfast.repo.format.rank_manifests import read_manifests
from holdfast.repo.handle.repository import Repository
from holdfast.repo.names.generations import read_listed
from holdfast.repo.names.roots import is_present, iter_needed
from holdfast.repo.names.snapshots import CommittedSnapshot, parse_snapshot
from holdfast.repo.read.any_copy import StoredChunk, read_stated_base
from holdfast.repo.read.reader import is_readable

_KEPT_BLOCKS: Final = 8
_BASE_CANDIDATES: Final = 8
"""How many of the newest records are tried as a base; records of deleted names are skipped."""


class WantedChunk(NamedTuple):
    """A chunk that a save needs, and that may be stored already."""

    digest: Digest
    size_bytes: int
    data: memoryview | None = None
    """Its bytes; None if they were not copied from the device that they are on."""

    def equals(self, stored: Buffer) -> bool:
        """Return whether stored bytes are this chunk: by comparison with its own, or by their digest."""
        if self.data is None:
            return hash_bytes(stored) == self.digest
        return fingerprint(stored) == fingerprint(self.data)


class ExistingChunks:
    """Finds stored chunks, in base manifests first, then in the index; used by one thread."""

    def __init__(self, repo: Repository, bases: Sequence[Manifest], *, avoid: frozenset[str]) -> None:
        """Search `bases`, then the index as last refreshed; packs whose key is in `avoid` count as absent."""
        self._store = repo.store
        self._is_checked = repo.store.traits.checked_uploads
        self._avoid = avoid
        self._bases = [(base, base.locate_all()) for base in bases]
        self._index = repo.index
        self._proven = repo.proven
        self._packs: dict[str, ObjectInfo | None] = {}
        self._turn: int | None = None
        self.damaged_packs: set[str] = set()
        """Ids of packs in which a copy was found to be damaged."""
        self._blocks = BlockPool(CHUNK_BYTES, kept=_KEPT_BLOCKS)
        self.is_empty = not any(rows for _, rows in self._bases) and not len(repo.index)
        """No chunk can be found, as in the first save of a store."""

    def find(self, digest: Digest, size_bytes: int) -> list[Location]:
        """Return the locations of all copies of a chunk that look usable; reads no copy."""
        return list(self.iter_copies(digest, size_bytes))

    def iter_copies(self, digest: Digest, size_bytes: int) -> Iterator[Location]:
        """Yield what `find` returns, the likeliest location first; mostly the caller needs no more than that."""
        return (at for at in self._iter_candidates(digest, size_bytes) if self._is_usable(at, size_bytes))

    def is_copy(self, location: Location, digest: Digest, size_bytes: int) -> bool:
        """Read a copy and return whether its bytes have `digest`; safe in any thread."""
        with self._blocks.lend() as block:
            chunk = self._read(location, block, size_bytes)
            return chunk is not None and hash_bytes(chunk.raw) == digest

    def read_copy(self, location: Location, digest: Digest, size_bytes: int) -> StoredChunk | None:
        """Return a copy, or None if it cannot be read or is damaged; safe in any thread."""
        chunk = self._read(location, memoryview(bytearray(location.stored_bytes)), size_bytes)
        return chunk if chunk is not None and hash_bytes(chunk.raw) == digest else None

    def is_intact(self, location: Location, wanted: WantedChunk) -> bool:
        """Read a copy and return whether it is the chunk that is wanted; safe in any thread."""
        # The version from before the read: if the pack changes during the read, the remembered version is outdated.
        packs = [(at, self._find_pack(at.pack_id)) for at in iter_places(location)]
        with self._blocks.lend() as block:
            chunk = self._read(location, block, wanted.size_bytes)
            is_same = chunk is not None and wanted.equals(chunk.raw)
        for at, pack in packs:
            if is_same and pack:
                self._proven.add(at, version=pack.version)
            else:  # of a delta and its base, either may be what is damaged
                self._proven.forget(at.pack_id)
                self.damaged_packs.add(at.pack_id)
        return is_same

    def read_packs(self, wanted: Iterable[WantedChunk]) -> None:
        """Ask at once for the packs that may contain these chunks, if requests wait; `iter_copies` then need not."""
        self._packs.update(self._store.run_early(self._iter_pack_reads(wanted)))

    def _iter_pack_reads(self, wanted: Iterable[WantedChunk]) -> Iterator[Callable[[], tuple[str, ObjectInfo | None]]]:
        packs: set[str] = set()
        for digest, size_bytes, _ in wanted:
            in_base = next((base for base, rows in self._bases if digest in rows), None)
            if in_base:
                packs.update(in_base.packs)  # the following chunks are probably in the same base
            else:
                packs.update(at.pack_id for at in self._index.find(digest, size_bytes))
        for pack_id in packs - self._packs.keys():
            if pack_key(pack_id) not in self._avoid:
                yield partial(self._read_pack, pack_id)

    def is_proven(self, location: Location) -> bool:
        """Return whether a copy is intact without being read: the store says so, or this handle verified it lately."""
        if self._is_checked:
            return all(self._find_pack(at.pack_id) is not None for at in iter_places(location))
        turn = self._turn = self._proven.begin_turn() if self._turn is None else self._turn
        return all(self._covers(at, turn) for at in iter_places(location))

    def _covers(self, location: Location, turn: int) -> bool:
        pack = self._find_pack(location.pack_id)
        return pack is not None and self._proven.covers(location, version=pack.version, turn=turn)

    def _find_pack(self, pack_id: str) -> ObjectInfo | None:
        """Return the size and version of a pack, None if it is missing; asks the store once per save."""
        if pack_id not in self._packs:
            self._packs.update([self._read_pack(pack_id)])
        return self._packs[pack_id]

    def _read_pack(self, pack_id: str) -> tuple[str, ObjectInfo | None]:
        try:
            return pack_id, self._store.stat(pack_key(pack_id))
        except NotFound:
            return pack_id, None

    def _read(self, location: Location, block: memoryview, size_bytes: int) -> StoredChunk | None:
        stored = block[: location.stored_bytes]
        try:
            self._store.read_into(pack_key(location.pack_id), location.offset, stored)
            if location.codec != DELTA:
                return StoredChunk(open_stored(location, stored, size_bytes), stored, location.codec)
            base = None if location.base is None else read_stated_base(self._store, location.base, size_bytes)
            return None if base is None else StoredChunk(open_delta(location, stored, base), stored, DELTA)
        except (NotFound, Corrupt, StoreError):
            return None  # an unreadable sector counts as damage: the chunk is written again, and the save succeeds

    def _iter_candidates(self, digest: Digest, size_bytes: int) -> Iterator[Location]:
        for base, rows in self._bases:
            if digest in rows:
                yield base.location(rows[digest])
        for at in self._index.find(digest, size_bytes):
            found = self._find_base(at, size_bytes) if at.codec == DELTA else at
            if found is not None:
                yield found

    def _find_base(self, location: Location, size_bytes: int) -> Location | None:
        """Return the location of a delta with that of its base, which the index does not state; None if it has none."""
        head = memoryview(bytearray(DIGEST_BYTES))
        if pack_key(location.pack_id) in self._avoid:
            return None
        try:
            self._store.read_into(pack_key(location.pack_id), location.offset, head)
        except (NotFound, Corrupt, StoreError):
            return None
        digest = find_base_digest(head)
        copies = (at for at in self._index.find(digest, size_bytes) if at.codec != DELTA)
        usable = next((at for at in copies if self._is_present(at, size_bytes)), None)
        return None if usable is None else location._replace(base=Base(digest, usable))

    def _is_usable(self, location: Location, size_bytes: int) -> bool:
        return all(self._is_present(at, size_bytes) for at in iter_places(location))

    def _is_present(self, location: Location, size_bytes: int) -> bool:
        is_possible = has_possible_size(location.codec, location.stored_bytes, size_bytes)
        if pack_key(location.pack_id) in self._avoid or not is_possible:
            return False
        pack = self._find_pack(location.pack_id)
        return pack is not None and location.offset + location.stored_bytes <= pack.size_bytes


def read_bases(store: ObjectStore, candidates: Sequence[CommittedSnapshot | None]) -> list[Manifest]:
    """Read the manifests of snapshots whose chunks may be reused; skips those that are missing or damaged."""
    manifests: dict[str, Sequence[Manifest]] = {}
    for snapshot in candidates:
        if snapshot and snapshot.manifest.manifest_id not in manifests:
            try:
                manifests[snapshot.manifest.manifest_id] = read_manifests(store, snapshot.manifest).with_chunks
            except (NotFound, Corrupt, NewerFormat):
                continue
    return [manifest for found in manifests.values() for manifest in found]


def read_base(
    repo: Repository, name: str, *, listed: Sequence[ObjectInfo] | None = None, is_needed: bool = False
) -> CommittedSnapshot | None:
    """Return the newest snapshot under the same prefix as `name`: most likely the previous step.

    A handle that has not saved under the prefix yet would have to list all names. It does so only if `listed` has them
    already, if that costs little and the index is empty, or if the base `is_needed`: otherwise the index finds the
    chunks.
    """
    remembered = repo.recent.find(name)
    if remembered:
        return remembered
    if listed is None:
        if not is_needed and (not repo.store.traits.cheap_listings or len(repo.index)):
            return None
        listed = list(repo.store.iter_objects(SNAPSHOTS))
    prefix = split_prefix(name)
    stems = dict(_group_by_stem(info for info in listed if may_start_with(info.key, prefix)))
    # Some servers round times to seconds; of equally new ones, the last step is the best guess.
    newest = heapq.nlargest(
        _BASE_CANDIDATES, stems, key=lambda stem: (stems[stem].modified_s, natural_order(split_stem(stem)))
    )
    for stem in newest:
        snapshot = _read_candidate(repo.store, stem, stems[stem].generations)
        if snapshot and snapshot.name.startswith(prefix):
            return snapshot
    return None


class _ListedName(NamedTuple):
    """The records of one name, from a listing."""

    generations: list[int]
    modified_s: float


def _group_by_stem(listed: Iterable[ObjectInfo]) -> Iterator[tuple[str, _ListedName]]:
    splits = ((split, info) for info in listed if (split := split_generation(info.key)))
    for stem, group in itertools.groupby(splits, key=lambda each: each[0][0]):
        records = list(group)
        newest_s = max(info.modified_s for _, info in records)
        yield stem, _ListedName([generation for (_, generation), _ in records], newest_s)


def _read_candidate(store: ObjectStore, stem: str, generations: list[int]) -> CommittedSnapshot | None:
    """Return the current snapshot of a name; None if deleted or damaged."""
    try:
        fields = read_listed(store, stem, generations).fields
        return parse_snapshot(fields) if fields and fields.text("state") == "live" else None
    except (Corrupt, NewerFormat):
        return None


def list_names(repo: Repository, name: str) -> Sequence[ObjectInfo] | None:
    """List all names in one request, to find the base of `name`; None if one is known or there are too many."""
    return None if repo.recent.find(name) else repo.store.list_at_most(SNAPSHOTS, PAGE_LIMIT)


def is_whole(repo: Repository, snapshot: CommittedSnapshot) -> bool:
    """Return whether a snapshot can be read: read every byte, or find all files if the store proves what it keeps."""
    store = repo.store
    if not store.traits.checked_uploads:
        return is_readable(repo, snapshot)
    try:
        needed = list(iter_needed(store, snapshot))
    except (Corrupt, NewerFormat):
        return False
    return bool(needed) and all(store.run_together([partial(is_present, store, key) for key in needed]))
